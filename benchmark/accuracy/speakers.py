"""How well speakers are told apart, in mixtures of voices that the bundled network never heard.

    python -m benchmark.accuracy.speakers [--model FILE] [--mixtures 5] [--seconds 90]
    python -m benchmark.accuracy.speakers --folder DIR [--model FILE]

Makes conversations of 2 to 6 of 18 synthetic voices, with pauses and noise. --folder takes
recordings, each with an RTTM file of the same name. Prints the diarization error rate without a
collar (pyannote.metrics, of the extra bench) and how often the count is right, beside a clustering
by mean pitch that is told the count, one label for all, and sherpa-onnx' clustering of the same
vectors; for made conversations also cpWER, and the processor time of requests with and without
speakers. Figures on synthetic voices say nothing of people.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psutil
from scipy.cluster.hierarchy import fcluster, linkage

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.speech import corpus
from benchmark.shared.speech.synthesis import (
    EDGE_FRAMES,
    FRAME_S,
    Manner,
    RefusedError,
    speak,
)
from benchmark.shared.speech.wav import to_pcm, wav_bytes
from benchmark.shared.word_errors import WordErrors, count_by_speaker, normaliser
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.settings import Settings, SpeakerSettings
from cluster.serve.in_process import local_transcriber
from router.api.params import SpeakerOptions, TranscriptionParams
from router.audio.audio_file import AudioFile
from router.audio.clustering import Stretch, Turn, find_turns
from router.audio.embedding import WINDOW_SAMPLES, SpeakerNetwork, Vectors, fingerprint
from router.audio.protocol import AudioLimits, SpeakerSearch
from router.audio.vad import SpeechDetector
from router.audio.voices import Heard
from router.interface import RequestContext
from router.transcriber import RequestTranscriber
from router.transcript import Transcript

# espeak-ng's own variants, and the two voices of flite's that training leaves out.
UNHEARD = (
    "en-us+f1", "en-us+f2", "en-gb-x-rp+f4", "en-us+linda", "en-us+Andrea", "en-us+grandma",
    "en-us+m2", "en-us+m5", "en-us+m7", "en-gb-scotland+m3", "en-us+Mario", "en-us+Jacky",
    "en-us+ed", "en-us+iven", "en-us+klatt2", "en-029+max", "slt", "rms",
)  # fmt: skip
COUNTS = (2, 3, 4, 5, 6)
PITCH_HZ = (60, 400)
REQUEST_S = 600.0
SHERPA_THRESHOLD = 0.65
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Talk:
    """A recording, and who speaks when (start, end, speaker) in seconds; `texts` may be unknown."""

    name: str
    pcm: Pcm
    spoken: list[tuple[float, float, str]]
    texts: list[str]

    @property
    def n_speakers(self) -> int:
        return len({speaker for _, _, speaker in self.spoken})


def mixture(n_voices: int, seconds: float, seed: str) -> Talk:
    rng = Random(f"speakers/{seed}")
    voices = rng.sample(UNHEARD, n_voices)
    manners = {voice: (rng.randint(135, 185), 10 ** (rng.uniform(-8, 0) / 20)) for voice in voices}
    voice, at, end = voices[0], rng.uniform(0.2, 1.0), round(seconds * SAMPLE_RATE)
    audio = np.zeros(end, np.float32)
    spoken: list[tuple[float, float, str]] = []
    texts: list[str] = []
    while True:
        for _ in range(rng.choice((1, 1, 2, 3))):
            rate, gain = manners[voice]
            own = round(rate * rng.uniform(0.88, 1.14))
            manner = Manner(voice, own, rng.randint(25, 75), rng.uniform(0.9, 1.1), 1.0)
            try:
                text = corpus.spoken_sentence(rng)
                said = speak(text, manner).samples
            except RefusedError:
                continue
            first = round(at * SAMPLE_RATE)
            if first + said.shape[0] > end:
                noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(end)
                audio += (10 ** (rng.uniform(-70, -38) / 20) * noise).astype(np.float32)
                return Talk(f"{n_voices} voices {seed}", to_pcm(audio), spoken, texts)
            audio[first : first + said.shape[0]] += gain * said.astype(np.float32) / 32768
            long_s, edge_s = said.shape[0] / SAMPLE_RATE, EDGE_FRAMES * FRAME_S
            spoken.append((at + edge_s, at + long_s - edge_s, voice))
            texts.append(text)
            at += long_s + rng.uniform(0.1, 0.5)
        at += rng.uniform(0.0, 0.8)
        voice = rng.choice([other for other in voices if other != voice] or voices)


def recordings(folder: Path) -> Iterator[Talk]:
    limits = AudioLimits(2**40, 1e6, 0.0, 1e6, 2**40)
    for rttm in sorted(folder.glob("*.rttm")):
        (audio,) = (one for one in folder.glob(f"{rttm.stem}.*") if one != rttm)
        spoken = []
        for line in rttm.read_text().splitlines():
            kind, _, _, start, long, _, _, speaker, *_ = line.split()
            if kind == "SPEAKER":
                spoken.append((float(start), float(start) + float(long), speaker))
        yield Talk(rttm.stem, np.concatenate(list(AudioFile(audio, limits).blocks())), spoken, [])


def result(steps: Generator[None, None, T]) -> T:
    """Run one of the audio worker's generators to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


class Stage:
    def __init__(self, settings: SpeakerSettings) -> None:
        self.detector = SpeechDetector()
        self.network = SpeakerNetwork(Path(settings.model or ""))
        self.threshold = settings.threshold or 0.0

    def hear(self, pcm: Pcm) -> tuple[Vectors, list[Stretch]]:
        heard = Heard(self.detector, self.network)
        for at in range(0, pcm.shape[0], SAMPLE_RATE):
            for _ in heard.feed(pcm[at : at + SAMPLE_RATE]):
                pass
        return result(heard.finish()), heard.stretches

    def turns(self, vectors: Vectors, stretches: list[Stretch], n: int | None = None) -> list[Turn]:
        search = SpeakerSearch((), n or 1, n, self.threshold)
        return result(find_turns(vectors, stretches, search))


def pitches(pcm: Pcm, stretches: list[Stretch]) -> npt.NDArray[np.float64]:
    """Return the log of each window's mean pitch, by autocorrelation, [n]."""
    shortest, longest = SAMPLE_RATE // PITCH_HZ[1], SAMPLE_RATE // PITCH_HZ[0]
    found = []
    for middle in (middle for stretch in stretches for middle in stretch.middles):
        first = max(0, middle - WINDOW_SAMPLES // 2)
        window = pcm[first : first + WINDOW_SAMPLES].astype(np.float64)
        frames = window[: len(window) // 800 * 800].reshape(-1, 800)  # of 50 ms
        spectrum = np.fft.rfft(frames, 2048)
        similar = np.fft.irfft(np.abs(spectrum) ** 2)[:, shortest:longest]
        voiced = similar.max(1) > np.median(similar.max(1))
        found.append(np.log(similar[voiced].argmax(1) + shortest).mean() if voiced.any() else 4.5)
    return np.array(found)


def labelled(stretches: list[Stretch], labels: npt.NDArray[Any]) -> list[Turn]:
    vectors = np.eye(int(labels.max()) + 1, dtype=np.float32)[labels]
    return result(find_turns(vectors, stretches, SpeakerSearch(threshold=0.5)))


def error_rate(talk: Talk, turns: list[Turn]) -> tuple[float, bool]:
    """Return the diarization error rate in percent, and whether the count is right."""
    from pyannote.core import Annotation, Segment
    from pyannote.metrics.diarization import DiarizationErrorRate

    said, found = Annotation(), Annotation()
    for i, (start, end, speaker) in enumerate(talk.spoken):
        said[Segment(start, end), i] = speaker
    for i, (first, last, number) in enumerate(turns):
        found[Segment(first / SAMPLE_RATE, last / SAMPLE_RATE), i] = number
    rate = DiarizationErrorRate(collar=0.0, skip_overlap=False)(
        said, found, uem=Segment(0, talk.pcm.shape[0] / SAMPLE_RATE)
    )
    return 100 * float(rate), len({number for *_, number in turns}) == talk.n_speakers


def ways(stage: Stage, talk: Talk) -> dict[str, list[Turn]]:
    vectors, stretches = stage.hear(talk.pcm)
    tree = linkage(pitches(talk.pcm, stretches)[:, None], "average")
    by_pitch = fcluster(tree, talk.n_speakers, "maxclust") - 1
    found = {
        "found": stage.turns(vectors, stretches),
        "count given": stage.turns(vectors, stretches, talk.n_speakers),
        "mean pitch, count given": labelled(stretches, by_pitch),
        "one label": [(one.start, one.end, 0) for one in stretches],
    }
    try:
        import sherpa_onnx
    except ImportError:
        return found
    options = sherpa_onnx.FastClusteringConfig(num_clusters=-1, threshold=SHERPA_THRESHOLD)
    labels = sherpa_onnx.FastClustering(options)(vectors)
    return found | {"sherpa-onnx' clustering": labelled(stretches, np.array(labels))}


def processor_s() -> float:
    """Return the processor time of this process and of its children, the audio workers."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(each.user + each.system for each in times)


async def transcribed(
    pcm: Pcm, transcriber: RequestTranscriber, speakers: SpeakerOptions
) -> tuple[Transcript, float]:
    """Transcribe with word times as a whole request; return the processor time in seconds, too."""
    params = TranscriptionParams("demo", language="en", words=True, speakers=speakers)
    with NamedTemporaryFile(suffix=".wav") as file:
        file.write(wav_bytes(pcm))
        file.flush()
        context = RequestContext.unlimited("benchmark", REQUEST_S)
        before_s = processor_s()
        answer = await transcriber.transcribe(Path(file.name), params, context)
    return answer.transcript, processor_s() - before_s


def errors_by_speaker(talk: Talk, transcript: Transcript) -> WordErrors:
    said: dict[str, list[str]] = {}
    heard: dict[str | None, list[str]] = {}
    for (_, _, speaker), text in zip(talk.spoken, talk.texts, strict=True):
        said.setdefault(speaker, []).append(text)
    for segment in transcript.segments:
        heard.setdefault(segment.speaker, []).append(segment.text)
    plain = normaliser("en")
    return count_by_speaker(
        *([plain(" ".join(texts)) for texts in by.values()] for by in (said, heard))
    )


async def by_requests(talks: Sequence[Talk]) -> dict[str, Any]:
    """Measure cpWER by the number of speakers, and processor time with and without them."""
    found: dict[str, WordErrors] = {}
    plain_s: list[float] = []
    search_s: list[float] = []
    asked = SpeakerOptions(by="voice")
    async with local_transcriber(Settings()) as transcriber:
        await transcribed(talks[0].pcm[::-1].copy(), transcriber, asked)  # not counted: first uses
        for i, talk in enumerate(talks):
            # Without speakers each sample has another last bit, so that no result is cached.
            both = [(search_s, talk.pcm, asked), (plain_s, talk.pcm ^ 1, SpeakerOptions())]
            if i % 2:  # by turns, because the first of the two may find colder caches
                both.reverse()
            for spent_s, pcm, options in both:
                transcript, busy_s = await transcribed(pcm, transcriber, options)
                spent_s.append(busy_s)
                if options is asked:
                    n = str(talk.n_speakers)
                    found[n] = found.get(n, WordErrors()) + errors_by_speaker(talk, transcript)
    ms = 1000 * len(talks) / sum(talk.pcm.shape[0] / SAMPLE_RATE for talk in talks)
    return {
        "cpWER": {n: round(one.wer, 1) for n, one in sorted(found.items())},
        "cpu_ms_per_audio_s": round(ms * median(plain_s), 2),
        "with_speakers": round(ms * median(search_s), 2),
        "ratio": round(median(map(truediv, search_s, plain_s)), 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="ONNX file, or 'demo'")
    parser.add_argument("--threshold", type=float, help="as speakers.threshold")
    parser.add_argument("--folder", type=Path, help="recordings and RTTM files")
    parser.add_argument("--mixtures", type=int, default=5, help="of each number of voices")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a mixture")
    asked = parser.parse_args()
    wanted = SpeakerSettings(model=asked.model, threshold=asked.threshold)
    settings = Settings(speakers=wanted).speaker_network()
    stage = Stage(settings)
    made = [
        mixture(n, asked.seconds, f"{i}/{n}")
        for n in (() if asked.folder else COUNTS)
        for i in range(asked.mixtures)
    ]
    rates: dict[str, dict[str, list[tuple[float, bool]]]] = {}
    for talk in recordings(asked.folder) if asked.folder else made:
        for way, turns in ways(stage, talk).items():
            of_count = rates.setdefault(way, {}).setdefault(str(talk.n_speakers), [])
            of_count.append(error_rate(talk, turns))
            print(f"{talk.name}: {way}: {of_count[-1][0]:.1f} %, count {of_count[-1][1]}")
    figures = {
        way: {
            n: {
                "error_rate": round(fmean(rate for rate, _ in each), 1),
                "right_count": round(fmean(right for _, right in each), 2),
            }
            for n, each in sorted(by_count.items())
        }
        for way, by_count in rates.items()
    }
    facts: dict[str, Any] = {
        "model": fingerprint(Path(settings.model or "")),
        "threshold": settings.threshold,
    }
    if made:
        facts |= asyncio.run(by_requests(made))
    print_result("speakers", facts | figures)


if __name__ == "__main__":
    main()

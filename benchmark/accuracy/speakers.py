"""How well speakers are told apart by voice, in mixtures of voices that the toy never heard.

    python -m benchmark.accuracy.speakers [--model FILE] [--mixtures 5] [--seconds 90]
    python -m benchmark.accuracy.speakers --folder DIR [--model FILE]

Makes conversations of 2 to 6 of 18 synthetic voices, with pauses and noise; pitch and rate change
from utterance to utterance. --folder takes recordings with an RTTM file of the same name beside
each. Prints the diarization error rate without a collar (pyannote.metrics, of the extra bench) and
how often the count is right, beside one label for all and sherpa-onnx' clustering of the same
vectors; of made conversations also cpWER, by the whole way of a request with the bundled model.
Figures on synthetic voices say nothing of people.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

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
from router.audio.embedding import SpeakerNetwork, Vectors, fingerprint
from router.audio.protocol import AudioLimits, SpeakerSearch
from router.audio.vad import BLOCK_SAMPLES, SharedStream, SpeechDetector
from router.audio.voices import Heard
from router.interface import RequestContext

# espeak-ng's own variants, and the two voices of flite's that training leaves out.
UNHEARD = (
    "en-us+f1", "en-us+f2", "en-gb-x-rp+f4", "en-us+linda", "en-us+Andrea", "en-us+grandma",
    "en-us+m2", "en-us+m5", "en-us+m7", "en-gb-scotland+m3", "en-us+Mario", "en-us+Jacky",
    "en-us+ed", "en-us+iven", "en-us+klatt2", "en-029+max", "slt", "rms",
)  # fmt: skip
COUNTS = (2, 3, 4, 5, 6)
REQUEST_S = 600.0
SHERPA_THRESHOLD = 0.65
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Talk:
    """A recording, and who speaks from when to when, in seconds. texts: of the same, if known."""

    name: str
    pcm: Pcm
    spoken: list[tuple[float, float, str]]
    texts: list[str]

    @property
    def n_speakers(self) -> int:
        return len({speaker for _, _, speaker in self.spoken})


def mixture(n_voices: int, seconds: float, seed: str) -> Talk:
    """A made conversation: turns of one to three utterances, each of its own pitch and rate."""
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
    """The folder's recordings that have an RTTM file beside them."""
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
    """What a generator of the audio worker's returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: T = end.value
            return found


class Stage:
    """What an audio worker does for a recording, and how long that takes it beside cutting."""

    def __init__(self, settings: SpeakerSettings) -> None:
        self.detector = SpeechDetector()
        self.network = SpeakerNetwork(Path(settings.model or ""))
        self.threshold = settings.threshold or 0.0
        self.busy_s = 0.0

    def hear(self, pcm: Pcm) -> tuple[Vectors, list[Stretch]]:
        shared = SharedStream(self.detector)
        feed = shared.reader()  # the transcription's, which hears the same blocks
        for at in range(0, pcm.shape[0], BLOCK_SAMPLES):
            feed(pcm[at : at + BLOCK_SAMPLES])
        began_s = time.process_time()
        heard = Heard(self.detector, self.network, shared)
        for at in range(0, pcm.shape[0], SAMPLE_RATE):
            for _ in heard.feed(pcm[at : at + SAMPLE_RATE]):
                pass
        vectors = result(heard.finish())
        self.busy_s += time.process_time() - began_s
        return vectors, heard.stretches

    def turns(self, vectors: Vectors, stretches: list[Stretch], n: int | None = None) -> list[Turn]:
        began_s = time.process_time()
        search = SpeakerSearch((), n or 1, n, self.threshold)
        found = result(find_turns(vectors, stretches, search))
        self.busy_s += 0.0 if n else time.process_time() - began_s
        return found


def labelled(stretches: list[Stretch], labels: npt.NDArray[Any]) -> list[Turn]:
    """Turns by the label of each window, without a second pass."""
    vectors = np.eye(int(labels.max()) + 1, dtype=np.float32)[labels]
    return result(find_turns(vectors, stretches, SpeakerSearch(threshold=0.5)))


def error_rate(talk: Talk, turns: list[Turn]) -> tuple[float, bool]:
    """Diarization error rate in per cent, without a collar, and whether the count is right."""
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
    """The turns by every way."""
    vectors, stretches = stage.hear(talk.pcm)
    found = {
        "found": stage.turns(vectors, stretches),
        "count given": stage.turns(vectors, stretches, talk.n_speakers),
        "one label": [(one.start, one.end, 0) for one in stretches],
    }
    try:
        import sherpa_onnx
    except ImportError:
        return found
    options = sherpa_onnx.FastClusteringConfig(num_clusters=-1, threshold=SHERPA_THRESHOLD)
    labels = sherpa_onnx.FastClustering(options)(vectors)
    return found | {"sherpa-onnx' clustering": labelled(stretches, np.array(labels))}


async def errors_by_count(talks: Iterable[Talk]) -> dict[str, WordErrors]:
    """cpWER's errors of made conversations by the whole way of a request, by number of speakers."""
    asked = SpeakerOptions(by="voice")
    params = TranscriptionParams("demo", language="en", words=True, speakers=asked)
    plain = normaliser("en")
    found: dict[str, WordErrors] = {}
    async with local_transcriber(Settings()) as transcriber:
        for talk in talks:
            with NamedTemporaryFile(suffix=".wav") as file:
                file.write(wav_bytes(talk.pcm))
                file.flush()
                context = RequestContext.unlimited("benchmark", REQUEST_S)
                answer = await transcriber.transcribe(Path(file.name), params, context)
            said: dict[str, list[str]] = {}
            heard: dict[str | None, list[str]] = {}
            for (_, _, speaker), text in zip(talk.spoken, talk.texts, strict=True):
                said.setdefault(speaker, []).append(text)
            for segment in answer.transcript.segments:
                heard.setdefault(segment.speaker, []).append(segment.text)
            counted = count_by_speaker(
                *([plain(" ".join(texts)) for texts in by.values()] for by in (said, heard))
            )
            n = str(talk.n_speakers)
            found[n] = found.get(n, WordErrors()) + counted
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="ONNX file, or 'demo'")
    parser.add_argument("--threshold", type=float, help="as speakers.threshold")
    parser.add_argument("--folder", type=Path, help="recordings and RTTM files")
    parser.add_argument("--mixtures", type=int, default=5, help="of each number of voices")
    parser.add_argument("--seconds", type=float, default=90.0, help="of a mixture")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
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
    total_s = 0.0
    for talk in recordings(asked.folder) if asked.folder else made:
        total_s += talk.pcm.shape[0] / SAMPLE_RATE
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
        "audio_s": round(total_s),
        "cpu_ms_per_audio_s": round(1000 * stage.busy_s / total_s, 2),
    }
    words = asyncio.run(errors_by_count(made)) if made else {}
    facts["cpWER"] = {n: round(one.wer, 1) for n, one in sorted(words.items())}
    print_result("speakers", facts | figures, asked.out)


if __name__ == "__main__":
    main()

"""Other libraries as live transcribers of one stream, on the same weights, beside our sessions.

openai-whisper and faster-whisper decode a growing buffer once a hop by LocalAgreement-2 behind the
words that two updates agreed on, which is the same policy for both. whisper-streaming (PyPI) has a
policy of its own, over faster-whisper; it is measured where it is installed:

    pip install --no-deps --target DIR whisper-streaming opus-fast-mosestokenizer
    PYTHONPATH=DIR python -m benchmark.serving.live ...

Audio comes on a clock that waits for nobody: an update begins when its audio is there and the one
before has ended, and takes as long as it takes on this machine. They know where the pauses are, so
they pay for no voice detector, and their buffers are cut there.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmark.serving.live_words import Told, percentile, word_delays
from benchmark.shared.talks import Talk
from benchmark.shared.word_errors import count_all, total
from cluster.messages import SAMPLE_RATE

PAUSE_S = 0.5  # as our sessions cut
MOST_BUFFER_S = 15.0  # of whisper-streaming's, which cuts by time

Audio = NDArray[np.float32]
Decode = Callable[[Audio, str], str]  # a buffer and the words that it begins with; all its words


@dataclass(frozen=True, slots=True)
class Row:
    """What one library did with the talks, one stream at a time.

    compute_s_per_audio_s: by the clock, with all cores; cpu_s_per_audio_s: of all of them together,
    which says more where other work runs beside it. Delays in seconds, of words that were heard
    right.
    """

    name: str
    compute_s_per_audio_s: float
    cpu_s_per_audio_s: float
    word_p50_s: float
    word_p95_s: float
    wer: float
    updates_per_audio_s: float


def rivals(
    talks: Sequence[Talk], model_name: str, hop_s: float, threads: int
) -> tuple[list[Row], list[str]]:
    """The rows of those that can be measured here, and why the others cannot."""
    rows, reasons = [], []
    for name, make in (("openai-whisper", _openai_whisper), ("faster-whisper int8", _ct2)):
        decode = make(model_name, threads)
        rows.append(_row(name, talks, [_agreeing(decode, talk, hop_s) for talk in talks]))
    if importlib.util.find_spec("whisper_streaming") is None:
        reasons.append("whisper-streaming is not installed")
    else:
        stream = _whisper_streaming(model_name, threads)
        told = [stream(talk, hop_s) for talk in talks]
        rows.append(_row("whisper-streaming over faster-whisper int8", talks, told))
    return rows, reasons


@dataclass(slots=True)
class _Stream:
    """One talk so far. free_s: when the last update ended, on the talk's clock."""

    told: list[Told]
    spent_s: float = 0.0
    cpu_s: float = 0.0
    free_s: float = 0.0
    updates: int = 0

    def spend(self, due_s: float, work: Callable[[], Any]) -> Any:
        """Do one update whose audio was there at `due_s`."""
        began_s, cpu_s = time.perf_counter(), time.process_time()
        result = work()
        self.cpu_s += time.process_time() - cpu_s
        took_s = time.perf_counter() - began_s
        self.spent_s += took_s
        self.updates += 1
        self.free_s = max(self.free_s, due_s) + took_s
        return result

    def tell(self, words: Sequence[str]) -> None:
        if words:
            self.told.append((self.free_s, "all", " ".join(words) + " "))


def _row(name: str, talks: Sequence[Talk], streams: Sequence[_Stream]) -> Row:
    audio_s = sum(talk.duration_s for talk in talks)
    pairs = list(zip(talks, streams, strict=True))
    delays = [delay for talk, one in pairs for delay in word_delays(talk, one.told)]
    texts = ["".join(text for _, _, text in one.told) for one in streams]
    return Row(
        name,
        sum(one.spent_s for one in streams) / audio_s,
        sum(one.cpu_s for one in streams) / audio_s,
        percentile(delays, 50),
        percentile(delays, 95),
        total(count_all([talk.text for talk in talks], texts, "en")).wer,
        sum(one.updates for one in streams) / audio_s,
    )


def _agreeing(decode: Decode, talk: Talk, hop_s: float) -> _Stream:
    """LocalAgreement-2 on one talk, with a last update of each stretch between two pauses."""
    stream, audio = _Stream([]), talk.pcm.astype(np.float32) / 32768
    for first_s, last_s in _stretches(talk):
        agreed: list[str] = []
        before: list[str] = []
        now_s = max(first_s + hop_s, stream.free_s)
        while now_s < last_s:
            words = _words(stream, decode, audio, first_s, now_s, agreed)
            same = _n_alike(words, before)
            stream.tell(words[len(agreed) : same])
            agreed, before = words[: max(same, len(agreed))], words
            now_s = max(now_s + hop_s, stream.free_s)
        words = _words(stream, decode, audio, first_s, last_s, agreed)
        stream.tell(words[len(agreed) :])
    return stream


def _words(
    stream: _Stream, decode: Decode, audio: Audio, first_s: float, last_s: float, agreed: list[str]
) -> list[str]:
    buffer = audio[round(first_s * SAMPLE_RATE) : round(last_s * SAMPLE_RATE)]
    text: str = stream.spend(last_s, lambda: decode(buffer, " ".join(agreed)))
    return text.split()


def _n_alike(new: Sequence[str], old: Sequence[str]) -> int:
    n = 0
    for one, other in zip(new, old, strict=False):
        if one != other:
            break
        n += 1
    return n


def _stretches(talk: Talk) -> list[tuple[float, float]]:
    """Between the pauses that our sessions cut at; a word's length is not known, so by gaps."""
    bounds = [0.0]
    for (_, end), (_, following) in zip(talk.words, talk.words[1:], strict=False):
        if following - end > 2 * PAUSE_S:
            bounds.append(end + PAUSE_S / 2)
    return list(zip(bounds, [*bounds[1:], talk.duration_s], strict=True))


def _openai_whisper(model_name: str, threads: int) -> Decode:
    import torch
    import whisper

    from cluster.model.tensor_files import locate
    from tests.support.references.openai_whisper import (
        openai_model,
        openai_vocabulary,
        reference_options,
    )

    torch.set_num_threads(threads)
    checkpoint = locate(model_name, weights=True)
    model, options = openai_model(checkpoint), reference_options(checkpoint)

    def decode(buffer: Audio, prefix: str) -> str:
        asked = whisper.DecodingOptions(
            language="en", without_timestamps=True, prefix=prefix or None, **options
        )
        with openai_vocabulary(checkpoint), torch.no_grad():
            mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(buffer))
            return str(whisper.decode(model, mel, asked).text)

    return decode


def _ct2(model_name: str, threads: int) -> Decode:
    from benchmark.rivals.faster_whisper_models import faster_whisper_model

    model, options = faster_whisper_model(model_name, "int8", threads)

    def decode(buffer: Audio, prefix: str) -> str:
        asked = {**options, "without_timestamps": True, "prefix": prefix or None}
        return "".join(segment.text for segment in model.transcribe(buffer, **asked)[0])

    return decode


def _whisper_streaming(model_name: str, threads: int) -> Callable[[Talk, float], _Stream]:
    """The package's own processor, which is fed by hand in place of its threads."""
    import whisper_streaming as library
    from whisper_streaming import backend

    from benchmark.rivals.faster_whisper_models import GREEDY, faster_whisper_files

    converted, suppressed = faster_whisper_files(model_name, "int8")
    given = {"language", "condition_on_previous_text"}  # by the package itself
    options = {name: value for name, value in GREEDY.items() if name not in given}

    def stream(talk: Talk, hop_s: float) -> _Stream:
        processor = library.ASRProcessor(
            library.ASRProcessor.ProcessorConfig(
                SAMPLE_RATE, 200, 1.0, audio_trimming=library.TimeTrimming(MOST_BUFFER_S)
            ),
            None,
            [],
            library.Backend.FASTER_WHISPER,
            backend.FasterWhisperModelConfig(
                str(converted), device="cpu", compute_type="int8", cpu_threads=threads
            ),
            backend.FasterWhisperTranscribeConfig(suppress_tokens=suppressed, **options),
            backend.FasterWhisperFeatureExtractorConfig(),
        )
        processor.backend.language = "en"
        done, audio = 0, talk.pcm.astype(np.float32) / 32768
        one, now_s = _Stream([]), hop_s
        while done < len(audio):
            last = min(len(audio), round(now_s * SAMPLE_RATE))
            piece = audio[done:last]
            word = one.spend(last / SAMPLE_RATE, lambda piece=piece: processor._process(piece))
            one.tell([] if word is None else word.word.split())
            done, now_s = last, max(now_s + hop_s, one.free_s)
        rest = processor._transcription_buffer.transcriptions_in_limbo
        one.tell(" ".join(word.word for word in rest).split())
        return one

    return stream

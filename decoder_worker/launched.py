"""A forward that was launched, and the one place that reads its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from decoder_worker.readback import Readback
from decoder_worker.sampling.sampler import Sampled
from decoder_worker.sampling.search import StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence


@dataclass(frozen=True, slots=True)
class Launched:
    """Sequences in a forward, and its results: one output for each row that was live."""

    sequences: tuple[DecodeSequence, ...]
    n_rows: tuple[int, ...]
    readbacks: tuple[Readback, ...]  # one after the other they have all rows


def launched(sequences: Sequence[DecodeSequence], *readbacks: Readback) -> Launched:
    """A forward of these sequences, in the order of their rows in `readbacks`."""
    return Launched(tuple(sequences), tuple(len(s.live) for s in sequences), readbacks)


def read_back(sampled: Sampled, no_speech: Tensor | None = None) -> Readback:
    """Begin to read a step's samples back, in the order in which `outputs_of` takes them."""
    columns = (sampled.tokens, sampled.logprobs, no_speech)
    return Readback((*columns, sampled.top_tokens, sampled.top_logprobs))


def outputs_of(readback: Readback) -> Iterator[StepOutput]:
    """What a step's rows have sampled; waits for the device."""
    tokens, logprobs, no_speech, *tops = (*readback.wait(), None)[:5]
    assert tokens is not None
    assert logprobs is not None
    probs = [0.0] * len(tokens) if no_speech is None else no_speech.tolist()
    ranked: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if len(tops) == 2 and tops[0] is not None and tops[1] is not None:
        pairs = zip(tops[0].tolist(), tops[1].tolist(), strict=True)
        ranked = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    columns = zip(tokens.tolist(), logprobs.tolist(), probs, ranked, strict=True)
    return (StepOutput(*column) for column in columns)

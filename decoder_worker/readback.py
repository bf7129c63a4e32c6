"""What a launched forward left on the device, and its copy to the host, which waits for nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.common.model.streams import new_event
from decoder_worker.sampling.sampler import Sampled
from decoder_worker.sampling.search import StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence


class Readback:
    """Copies of device tensors as they are at this point of the current stream.

    On a GPU they lie in pinned memory, which torch does not use again before the copy has been
    made. On a CPU they are the tensors themselves, unless these are `reused`: written again before
    they are read.
    """

    def __init__(self, tensors: Sequence[Tensor | None], *, reused: bool = False) -> None:
        """tensors: the first is one; None stays None."""
        self._event: torch.cuda.Event | None = None
        assert tensors[0] is not None
        if tensors[0].device.type == "cpu":
            copy = torch.clone if reused else _itself
            self._tensors = [None if t is None else copy(t) for t in tensors]
            return
        self._tensors = [None if t is None else _on_its_way(t) for t in tensors]
        self._event = new_event()
        self._event.record()

    def wait(self) -> list[Tensor | None]:
        """The tensors, on the CPU; blocks until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _on_its_way(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


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

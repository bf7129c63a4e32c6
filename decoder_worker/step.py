"""One decode step, from the slots and back to them, and the copy of its results to the host.

A step uses only tensors that stay in place, and asks nothing of the host: a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.common.model.streams import new_event
from decoder_worker.model import TextDecoder
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.search import StepOutput
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.scheduling.sequence import DecodeSequence


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts one after the other, on the device; int64.

    tokens, positions: [n_tokens]. read: [2 n], the indices of the n starts of transcript, then of
    the n last tokens. Padding may follow a last token: no token before sees it, and its KV is
    overwritten before it is read.
    """

    tokens: Tensor
    positions: Tensor
    read: Tensor


class DecodeStep:
    """Runs embedding, layers, logits, rules and sampling, and updates the slots."""

    def __init__(self, sampler: Sampler, slots: SlotTable, no_speech: int) -> None:
        self._sampler = sampler
        self._slots = slots
        self._no_speech = no_speech

    def __call__(
        self, index: Tensor, decoder: TextDecoder, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """Feed the slots' tokens and sample their next ones; noisy, n_top as in `Sampler`.

        index: int64 [n], the slots, in the order that `decoder` was planned for.
        """
        rows = self._slots.rows(index)
        states = decoder.states(rows.token, rows.position)
        return self._sampler(decoder.logits(states), rows, noisy, n_top)

    def logits(self, index: Tensor, decoder: TextDecoder) -> Tensor:
        """Feed the slots' tokens and leave the slots as they are; float32 [n, n_vocab]."""
        rows = self._slots.rows(index)
        return decoder.logits(decoder.states(rows.token, rows.position))

    def prompt_logits(self, prompts: Prompts, decoder: TextDecoder) -> tuple[Tensor, Tensor]:
        """Run prompts; logits [n, n_vocab] at their starts of transcript, and at their ends."""
        states = decoder.states(prompts.tokens, prompts.positions)
        both = decoder.logits(states[prompts.read])  # in one pass over the weights
        n = len(prompts.read) // 2
        return both[:n], both[n:]

    def start(
        self, prompts: Prompts, index: Tensor, decoder: TextDecoder, noisy: Tensor | None
    ) -> tuple[Sampled, Tensor]:
        """Run prompts and sample their first tokens; also returns no-speech probabilities [n]."""
        sots, lasts = self.prompt_logits(prompts, decoder)
        return self.sample(lasts, index, noisy), self.no_speech_probs(sots)

    def no_speech_probs(self, logits: Tensor) -> Tensor:
        """float32 [n] of logits [n, n_vocab] at the start of transcript, before any rule."""
        return (logits[:, self._no_speech] - logits.logsumexp(-1)).exp()

    def sample(
        self, logits: Tensor, index: Tensor, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        return self._sampler(logits, self._slots.rows(index), noisy, n_top)


class Readback:
    """Copies of device tensors as they are at this point of the current stream.

    On a GPU they lie in pinned memory, which torch does not reuse before a copy is complete. On a
    CPU they are the tensors themselves, or clones if `reused`: overwritten before they are read.
    """

    def __init__(self, tensors: Sequence[Tensor | None], *, reused: bool = False) -> None:
        self._event: torch.cuda.Event | None = None
        assert tensors[0] is not None
        if tensors[0].device.type == "cpu":
            self._tensors = [t.clone() if reused and t is not None else t for t in tensors]
            return
        self._tensors = [None if t is None else _on_its_way(t) for t in tensors]
        self._event = new_event()
        self._event.record()

    def wait(self) -> list[Tensor | None]:
        """Block until the copies are complete, and return them, on the CPU."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _on_its_way(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class Launched:
    """The sequences of a forward, and its results: one output for each live row."""

    sequences: tuple[DecodeSequence, ...]
    n_rows: tuple[int, ...]
    readbacks: tuple[Readback, ...]  # together they have all rows, in order


def launched(sequences: Sequence[DecodeSequence], *readbacks: Readback) -> Launched:
    return Launched(tuple(sequences), tuple(len(s.live) for s in sequences), readbacks)


def read_back(sampled: Sampled, no_speech: Tensor | None = None) -> Readback:
    """Begin to copy a step's samples to the host, in the order of `outputs_of`."""
    columns = (sampled.tokens, sampled.logprobs, no_speech)
    return Readback((*columns, sampled.top_tokens, sampled.top_logprobs))


def outputs_of(readback: Readback) -> Iterator[StepOutput]:
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

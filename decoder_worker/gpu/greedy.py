"""Greedy sampling of each row's next token in two kernels: rules, argmax, probability, slot.

The first goes over parts of the vocabulary, for three spans that the rules treat as one each
(words, end of text and what follows, allowed timestamps). The second combines a row's parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cluster.common.kernels.gpu.kernels import define, launcher
from cluster.common.kernels.gpu.self_check import KERNELS, is_as_on_cpu, noise
from decoder_worker.sampling.logit_rules import LogitRules, Marks, apply_rules
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.slots import SlotRows, SlotTable, advance, read_rows

PART = 4096  # tokens of the vocabulary
SPANS = 3
LOOKED_AT = 4  # rows of the check at start


def empty_parts(logits: Tensor) -> tuple[Tensor, ...]:
    """Allocate the first kernel's results for logits [n, n_vocab], each [n, SPANS, n_parts].

    Highest logits float32, -inf if nothing is allowed, NaN if a logit of the part is NaN; sums
    float32, of exp(logit - highest); places int32, the first token with the highest logit.
    """
    shape = (len(logits), SPANS, -(-logits.shape[1] // PART))
    dtypes = (torch.float32, torch.float32, torch.int32)
    return tuple(torch.empty(shape, dtype=dtype, device=logits.device) for dtype in dtypes)


def _plain(
    logits: Tensor,
    index: Tensor,
    table: Tensor,
    suppressed: Tensor,
    begin: Tensor,
    eot: int,
    no_timestamps: int,
    timestamp_begin: int,
    latest_first: int,
    highest: Tensor,
    sums: Tensor,
    places: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    marks = Marks(eot, no_timestamps, timestamp_begin, latest_first)
    rows = read_rows(table, torch.zeros(len(table)), index)
    ruled = apply_rules(logits.clone(), rows.history, suppressed, begin, marks)
    top, token = ruled.max(-1)
    sound = top.isfinite() & ~logits.isnan().any(-1)
    tokens.copy_(token.where(sound, 0))
    logprobs.copy_((top - ruled.logsumexp(-1)).where(sound, torch.nan))
    advance(table, rows, tokens, eot, timestamp_begin)


sample_greedy = define(
    "sample_greedy",
    writes=("table", "highest", "sums", "places", "tokens", "logprobs"),
    cuda=launcher("decoder_worker.gpu.kernels", "launch_greedy"),
    cpu=_plain,
)


class GpuSampler:
    """Implements `Sampler`; `reference` samples with noise, and for searches."""

    def __init__(self, reference: Sampler, rules: LogitRules, slots: SlotTable) -> None:
        self._reference = reference
        self._rules = (rules.suppressed, rules.begin, *rules.marks)
        self._slots = slots

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        if noisy is not None or n_top:
            return self._reference(logits, rows, noisy, n_top)
        tokens = torch.empty_like(rows.index)
        logprobs = torch.empty(len(rows.index), dtype=torch.float32, device=logits.device)
        read = (logits, rows.index, self._slots.table, *self._rules)
        sample_greedy(*read, *empty_parts(logits), tokens, logprobs)
        return Sampled(tokens, logprobs)

    def is_right(self) -> bool:
        """Whether the kernels choose the same as their plain twins on the CPU."""
        device, table = self._slots.device, self._slots.table[:LOOKED_AT].cpu()
        logits = noise(len(table), len(self._rules[0]))

        def choose(logits: Tensor, index: Tensor, table: Tensor, *rules: Any) -> list[Tensor]:
            tokens, logprobs = torch.empty_like(index), torch.empty_like(logits[:, 0])
            sample_greedy(logits, index, table, *rules, *empty_parts(logits), tokens, logprobs)
            return [tokens, logprobs, table]

        args = (logits, torch.arange(len(table)), table, *self._rules)
        return is_as_on_cpu(KERNELS, choose, device, *args)

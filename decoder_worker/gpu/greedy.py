"""Greedy sampling of each row's next token in two kernels: rules, argmax, probability, slot.

The first goes over the vocabulary in parts, which share out a GPU. Of each part it keeps, for the
three spans in which the rules forbid or allow as one (words; end of text and what follows; the
timestamps that are still allowed), the highest logit, its place, and the sum of exponentials. The
second puts the parts of a row together, decides which spans remain, and writes the row's slot.

Their plain twins are as far as possible written in the same steps; the reference for both is
`TorchSampler`, which also samples rows with noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.common.kernels.gpu.kernels import launcher
from cluster.common.model.operators import define, nothing
from decoder_worker.sampling.logit_rules import NEVER, LogitRules, Marks
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.slots import (
    BEFORE_IS,
    LAST_IS,
    LAST_TIMESTAMP,
    LIMIT,
    N_SAMPLED,
    POSITION,
    TIMED,
    TOKEN,
    SlotRows,
    SlotTable,
)

PART = 4096  # tokens of the vocabulary
SPANS = 3


class Parts(NamedTuple):
    """Of each row, span and part; [n, SPANS, n_parts].

    highest: float32, -inf where nothing is allowed; NaN where a logit of the part is NaN.
    sums: float32, of exp(logit - highest). places: int32, the first token with the highest logit.
    """

    highest: Tensor
    sums: Tensor
    places: Tensor

    @classmethod
    def empty(cls, logits: Tensor) -> Parts:
        """Room for those of logits [n, n_vocab]."""
        shape = (len(logits), SPANS, -(-logits.shape[1] // PART))
        dtypes = (torch.float32, torch.float32, torch.int32)
        return cls(*(torch.empty(shape, dtype=dtype, device=logits.device) for dtype in dtypes))


@dataclass(frozen=True, slots=True)
class Rules:
    """What of `LogitRules` the kernels read: suppressed float32 [n_vocab], begin int64 [m]."""

    suppressed: Tensor
    begin: Tensor
    marks: Marks


def reduce_logits(logits: Tensor, index: Tensor, table: Tensor, rules: Rules, parts: Parts) -> None:
    """Fill `parts` from logits float32 [n, n_vocab], contiguous, for the slots int64 [n]."""
    _reduce_logits(logits, index, table, rules.suppressed, rules.begin, *rules.marks, *parts)


def sample_greedy(
    parts: Parts, index: Tensor, table: Tensor, rules: Rules, tokens: Tensor, logprobs: Tensor
) -> None:
    """Write tokens int64 [n], logprobs float32 [n] and the slots. Mutates table."""
    marks = rules.marks
    _sample_greedy(*parts, index, table, marks.eot, marks.timestamp_begin, tokens, logprobs)


def _plain_reduce(
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
) -> None:
    n, n_vocab = logits.shape
    slots = table[index]
    first, timed = slots[:, N_SAMPLED] == 0, slots[:, TIMED] != 0
    last_is, before_is = slots[:, LAST_IS] != 0, slots[:, BEFORE_IS] != 0
    token = torch.arange(n_vocab, device=logits.device)
    allowed = logits + suppressed
    allowed[:, begin] = allowed[:, begin].masked_fill(first[:, None], NEVER)
    allowed[:, no_timestamps] = allowed[:, no_timestamps].masked_fill(timed, NEVER)
    low = timestamp_begin + (slots[:, LAST_TIMESTAMP] + (~last_is | before_is)).clamp(min=0)
    high = torch.where(first, min(n_vocab, timestamp_begin + latest_first + 1), n_vocab)
    high = high.where(~(last_is & before_is), low)
    low, high = low.where(timed, timestamp_begin), high.where(timed, n_vocab)
    stamps = (token >= low[:, None]) & (token < high[:, None])
    spans = (
        (token < eot).expand(n, -1),
        ((token >= eot) & (token < timestamp_begin)).expand(n, -1),
    )
    n_parts = highest.shape[2]
    for number, span in enumerate((*spans, stamps)):
        values = allowed.masked_fill(~span, NEVER)
        padded = torch.nn.functional.pad(values, (0, n_parts * PART - n_vocab), value=NEVER)
        cut = padded.view(n, n_parts, PART)
        top, place = cut.max(-1)
        highest[:, number] = top
        sums[:, number] = (cut - top.masked_fill(top == NEVER, 0.0)[..., None]).exp().sum(-1)
        places[:, number] = place + PART * torch.arange(n_parts, device=logits.device)
    broken = torch.nn.functional.pad(logits.isnan(), (0, n_parts * PART - n_vocab))
    highest[:, 0] = highest[:, 0].masked_fill(broken.view(n, n_parts, PART).any(-1), torch.nan)


def _plain_sample(
    highest: Tensor,
    sums: Tensor,
    places: Tensor,
    index: Tensor,
    table: Tensor,
    eot: int,
    timestamp_begin: int,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    slots = table[index]
    n_sampled, timed = slots[:, N_SAMPLED], slots[:, TIMED] != 0
    last_is, before_is = slots[:, LAST_IS] != 0, slots[:, BEFORE_IS] != 0
    tops, part = highest.max(-1)  # [n, SPANS]
    finite = tops.masked_fill(tops == NEVER, 0.0)
    totals = (sums * (highest - finite[..., None]).exp()).sum(-1)
    ends_segment = last_is & ~before_is & timed
    words = tops[:, 0].masked_fill(ends_segment, NEVER)
    best = torch.maximum(words, tops[:, 1])
    stamps_only = timed & ((n_sampled == 0) | (totals[:, 2].log() + finite[:, 2] > best))
    forbidden = torch.stack((ends_segment | stamps_only, stamps_only, torch.zeros_like(timed)), 1)
    tops = tops.masked_fill(forbidden & ~tops.isnan(), NEVER)
    top, span = tops.max(-1)
    total = (totals * (tops - top[:, None]).exp()).nan_to_num(0.0).sum(-1)
    rows = torch.arange(len(index), device=index.device)
    token = places[rows, span, part[rows, span]].long()
    sound = top.isfinite()
    tokens.copy_(token.where(sound, 0))
    logprobs.copy_((-total.log()).where(sound, torch.nan))
    is_stamp = tokens >= timestamp_begin
    goes_on = (tokens != eot) & (n_sampled + 1 < slots[:, LIMIT])
    slots[:, TOKEN] = tokens
    slots[:, POSITION] += goes_on
    slots[:, LAST_TIMESTAMP] = torch.where(
        is_stamp, tokens - timestamp_begin, slots[:, LAST_TIMESTAMP]
    )
    slots[:, BEFORE_IS] = (last_is | (n_sampled == 0)).long()
    slots[:, LAST_IS] = is_stamp.long()
    slots[:, N_SAMPLED] += 1
    table.index_copy_(0, index, slots)


_KERNELS = "decoder_worker.gpu.kernels"

_reduce_logits = define(
    "reduce_logits",
    writes=("highest", "sums", "places"),
    cuda=launcher(_KERNELS, "launch_reduce"),
    cpu=_plain_reduce,
    shapes=nothing,
)

_sample_greedy = define(
    "sample_greedy",
    writes=("table", "tokens", "logprobs"),
    cuda=launcher(_KERNELS, "launch_sample"),
    cpu=_plain_sample,
    shapes=nothing,
)


class GpuSampler:
    """Implements `Sampler`; `reference` samples with noise, and for searches among several."""

    def __init__(self, reference: Sampler, rules: LogitRules, slots: SlotTable) -> None:
        self._reference = reference
        self._rules = Rules(rules.suppressed, rules.begin, rules.marks)
        self._slots = slots

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        if noisy is not None or n_top:
            return self._reference(logits, rows, noisy, n_top)
        parts = Parts.empty(logits)
        tokens = torch.empty_like(rows.index)
        logprobs = torch.empty(len(rows.index), dtype=torch.float32, device=logits.device)
        reduce_logits(logits, rows.index, self._slots.table, self._rules, parts)
        sample_greedy(parts, rows.index, self._slots.table, self._rules, tokens, logprobs)
        return Sampled(tokens, logprobs)

"""The sampler of a GPU: two kernels for rows without noise, torch's operations for all others."""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_worker.gpu.greedy import Parts, Rules, reduce_logits, sample_greedy
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.slots import SlotRows, SlotTable


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

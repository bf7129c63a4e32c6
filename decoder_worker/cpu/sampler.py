"""The sampler of a CPU: compiled for rows without noise, torch's for all others."""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.jit.background import as_array
from decoder_worker.cpu.compiled import sampling_kernel
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.slots import SlotRows, SlotTable


class CompiledSampler:
    """Implements `Sampler`; until its kernel is built `reference` samples everything."""

    def __init__(self, reference: Sampler, rules: LogitRules, slots: SlotTable) -> None:
        self._reference = reference
        self._rules = rules
        self._slots = slots
        self._marks = rules.marks
        self._kernel = sampling_kernel()

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        sample = self._kernel.get()
        if sample is None or noisy is not None or n_top:
            return self._reference(logits, rows, noisy, n_top)
        tokens, logprobs = torch.empty_like(rows.index), torch.empty(len(rows.index))
        rules, table = self._rules, self._slots.table
        read = (logits, rows.index, table, rules.suppressed, rules.begin)
        sample(*map(as_array, read), self._marks, as_array(tokens), as_array(logprobs))
        return Sampled(tokens, logprobs)

"""The sampler of a CPU: compiled for rows without noise, torch's for all others."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from cluster.common.kernels.cpu.background import as_array
from decoder_worker.cpu.compiled import sampling_kernel
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.slots import SlotRows, SlotTable


class CompiledSampler:
    """Implements `Sampler`; until its kernel is built `reference` samples everything."""

    def __init__(
        self,
        reference: Sampler,
        rules: LogitRules,
        slots: SlotTable,
        team: StepTeam | None = None,
    ) -> None:
        """team: its threads share rows out; None: the calling thread does all."""
        self._reference = reference
        self._rules = rules
        self._slots = slots
        self._marks = rules.marks
        self._team = team or StepTeam(0)
        self._kernel = sampling_kernel()

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        sample = self._kernel.get()
        if sample is None or noisy is not None or n_top:
            return self._reference(logits, rows, noisy, n_top)
        tokens, logprobs = torch.empty_like(rows.index), torch.empty(len(rows.index))
        rules, table = self._rules, self._slots.table
        read = map(as_array, (logits, rows.index, table, rules.suppressed, rules.begin))
        job = partial(sample, *read, self._marks, as_array(tokens), as_array(logprobs))
        run = self._team.run if len(tokens) > 1 else self._team.run_alone
        run(job, len(tokens))
        return Sampled(tokens, logprobs)

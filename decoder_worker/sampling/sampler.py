"""From logits to the next token of each row: rules, temperature, choice, and its probability.

The choice is the argmax of `logits + temperature * noise`: greedy where the temperature is 0, a
draw from the softmax of `logits / temperature` above it. What the next step needs to know of it
goes into the rows' slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cluster.jit.background import InBackground, as_array
from decoder_worker.sampling.logit_rules import NEVER, LogitRules
from decoder_worker.sampling.noise import gumbel
from decoder_worker.sampling.slots import SlotRows, SlotTable

if TYPE_CHECKING:
    from decoder_worker.cpu.step_kernels import StepKernels


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's outcome; [n], on the device.

    tokens: int64. logprobs: float32, of each token after the rules, at temperature 1; NaN or
    infinite where the model gave no finite logits.
    top_tokens, top_logprobs: [n, n_top], the likeliest tokens of each row, best first; None where
    nobody asked for them.
    """

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor | None = None
    top_logprobs: Tensor | None = None


class Sampler:
    """Applies the rules and samples; one per engine.

    kernels: of a CPU, which do the same in one call where no row has noise.
    """

    def __init__(
        self,
        rules: LogitRules,
        slots: SlotTable,
        kernels: InBackground[StepKernels] | None = None,
    ) -> None:
        self._rules = rules
        self._slots = slots
        self._kernels = kernels
        marks = (rules.eot, rules.no_timestamps, rules.timestamp_begin, rules.latest_first)
        self._marks = np.array(marks, dtype=np.int64)

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """Sample one token for each row and note it in the rows' slots.

        Args:
            logits: float32 [n, n_vocab], changed in place.
            rows: as the slots stand, each slot at most once but for the inert one.
            noisy: int64 [m], the rows that get noise, all whose temperature is above 0 among
                them; None when there is none. At temperature 0 noise changes nothing.
            n_top: so many of each row's likeliest tokens are told as well; a beam search, which
                chooses among them, sets the rows' slots itself.
        """
        rules = self._rules
        if noisy is None and not n_top and self._kernels and (kernels := self._kernels.get()):
            return self._sample(logits, rows.index, kernels)
        rules.apply(logits, rows.history)
        total = logits.logsumexp(-1)
        tokens = logits.argmax(-1)
        if noisy is not None:
            tokens[noisy] = self._draw(logits[noisy], rows, noisy)
        logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - total
        self._slots.advance(rows, tokens, rules.eot, rules.timestamp_begin)
        if not n_top:
            return Sampled(tokens, logprobs)
        top, top_tokens = logits.topk(n_top)
        return Sampled(tokens, logprobs, top_tokens, top - total[:, None])

    def _sample(self, logits: Tensor, index: Tensor, kernels: StepKernels) -> Sampled:
        tokens, logprobs = torch.empty_like(index), torch.empty(len(index))
        rules = self._rules
        kernels.sample(
            *(as_array(logits), as_array(index), as_array(self._slots.table)),
            *(as_array(rules.suppressed), as_array(rules.begin), self._marks),
            *(as_array(tokens), as_array(logprobs)),
        )
        return Sampled(tokens, logprobs)

    def _draw(self, logits: Tensor, rows: SlotRows, noisy: Tensor) -> Tensor:
        """Changes neither logits nor rows; logits [m, n_vocab] of the noisy rows alone."""
        keys, steps = rows.noise_key[noisy], rows.history.n_sampled[noisy]
        noise = gumbel(keys, steps, logits.shape[1])
        return noise.mul_(rows.temperature[noisy][:, None]).add_(logits).argmax(-1)


def best_of(logits: Tensor, allowed: Tensor) -> Sampled:
    """The likeliest of `allowed` token ids (int64 [m]) in each row, by a softmax over them only.

    Whisper finds a window's language so. logits [n, n_vocab] stay as they are.
    """
    chosen = logits[:, allowed]
    best, index = chosen.max(-1)
    finite = torch.isfinite(chosen).all(-1)
    logprobs = torch.where(finite, best - chosen.logsumexp(-1), NEVER)
    return Sampled(allowed[index], logprobs)

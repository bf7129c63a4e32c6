"""From logits to the next token of each row: rules, temperature, choice, and its probability.

The choice is the argmax of `logits + temperature * noise`: greedy where the temperature is 0, a
draw from the softmax of `logits / temperature` above it. What the next step needs to know of it
goes into the rows' slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decoder_worker.sampling.logit_rules import NEVER, LogitRules
from decoder_worker.sampling.noise import gumbel
from decoder_worker.sampling.slots import SlotRows, SlotTable


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


class Sampler(Protocol):
    """Applies the rules and samples; one per engine."""

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """Sample one token for each row and note it in the rows' slots.

        Args:
            logits: float32 [n, n_vocab], changed in place.
            rows: as the slots stand, each slot at most once but for the inert one.
            noisy: int64 [m], the rows that get noise, all whose temperature is above 0 among
                them; None when there is none. At temperature 0 noise changes nothing.
            n_top: so many of each row's likeliest tokens are returned as well; a beam search, which
                chooses among them, sets the rows' slots itself.
        """


class TorchSampler:
    """Implements `Sampler` by torch's operations, on any device."""

    def __init__(self, rules: LogitRules, slots: SlotTable) -> None:
        self._rules = rules
        self._slots = slots

    def __call__(
        self, logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        rules = self._rules
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

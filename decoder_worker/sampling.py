"""From logits to the next token of each row: rules, temperature, choice, and its probability.

`SamplingState` keeps, on the device and by slot, all that a step needs to know of a sequence, so
that steps follow one another without the host. The choice is the argmax of
`logits + temperature * noise`: greedy where the temperature is 0, a draw from the softmax of
`logits / temperature` above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decoder_worker.logit_rules import NEVER, History, LogitRules
from decoder_worker.noise import gumbel


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """What a sequence brings into its slot; `noise_key` as from `decoder_worker.noise`."""

    timed: bool
    temperature: float
    noise_key: int


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


class SamplingState:
    """Per-slot state of running sequences: what the rules remember, temperature, noise key."""

    def __init__(self, n_slots: int, device: torch.device | str) -> None:
        self.history = History.empty(n_slots, device)
        self.temperature = torch.zeros(n_slots, dtype=torch.float32, device=device)
        self.noise_key = torch.zeros(n_slots, dtype=torch.int64, device=device)

    def load(
        self, slot: int, options: SlotOptions, tokens: Sequence[int], timestamp_begin: int
    ) -> None:
        """Set a slot to what it is after `tokens` were sampled (none, when a sequence begins)."""
        stamps = [token - timestamp_begin for token in tokens if token >= timestamp_begin]
        history = self.history
        history.n_sampled[slot] = len(tokens)
        history.last_is_timestamp[slot] = bool(tokens) and tokens[-1] >= timestamp_begin
        history.before_is_timestamp[slot] = len(tokens) < 2 or tokens[-2] >= timestamp_begin
        history.last_timestamp[slot] = stamps[-1] if stamps else -1
        history.timed[slot] = options.timed
        self.temperature[slot] = options.temperature
        self.noise_key[slot] = options.noise_key


class Sampler:
    """Applies the rules and samples; one per engine."""

    def __init__(self, rules: LogitRules, state: SamplingState) -> None:
        self._rules = rules
        self._state = state

    def __call__(
        self, logits: Tensor, slots: Tensor, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """Sample one token for each row and note it in the rows' slots.

        Args:
            logits: float32 [n, n_vocab], changed in place.
            slots: int64 [n], each at most once.
            noisy: int64 [m], the rows whose temperature is above 0; None when there is none.
            n_top: so many of each row's likeliest tokens are told as well; a beam search, which
                chooses among them, sets the rows' slots itself.
        """
        history = self._state.history.rows(slots)
        self._rules.apply(logits, history)
        total = logits.logsumexp(-1)
        tokens = logits.argmax(-1)
        if noisy is not None:
            tokens[noisy] = self._draw(logits[noisy], slots[noisy])
        logprobs = logits.gather(1, tokens[:, None]).squeeze(1) - total
        after = history.after(tokens, self._rules.timestamp_begin)
        self._state.history.write(slots, after)
        if not n_top:
            return Sampled(tokens, logprobs)
        top, top_tokens = logits.topk(n_top)
        return Sampled(tokens, logprobs, top_tokens, top - total[:, None])

    def _draw(self, logits: Tensor, slots: Tensor) -> Tensor:
        noise = gumbel(
            self._state.noise_key[slots], self._state.history.n_sampled[slots], logits.shape[1]
        )
        return noise.mul_(self._state.temperature[slots][:, None]).add_(logits).argmax(-1)


def best_of(logits: Tensor, allowed: Tensor) -> Sampled:
    """The likeliest of `allowed` token ids (int64 [m]) in each row, by a softmax over them only.

    Whisper finds a window's language so. logits [n, n_vocab] stay as they are.
    """
    chosen = logits[:, allowed]
    best, index = chosen.max(-1)
    finite = torch.isfinite(chosen).all(-1)
    logprobs = torch.where(finite, best - chosen.logsumexp(-1), NEVER)
    return Sampled(allowed[index], logprobs)

"""Samples each row's next token: rules, temperature, choice, probability.

The choice is the argmax of `logits + temperature * noise`. The noise's bits are a hash of (seed,
window, attempt, candidate, step, token), so they are equal on any device, in any batch; the
logarithms after it may differ in the last place. Keys are mixed with splitmix64's finalizer
(Steele, Lea, Flood 2014), tokens twice with a 32-bit hash (constants from hash-prospector).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decoder_worker.sampling.logit_rules import NEVER, LogitRules
from decoder_worker.sampling.slots import SlotRows, SlotTable, advance


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step's outcome; [n], on the device.

    tokens: int64. logprobs: float32, of each token after the rules, at temperature 1; not finite if
        the logits were not.
    top_tokens, top_logprobs: [n, n_top], the likeliest tokens of each row, best first; or None.
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
        """Sample one token for each row and update the rows' slots.

        logits: float32 [n, n_vocab], changed. rows: the slots, each at most once except the inert
        one. noisy: int64 [m], rows that get noise, with all whose temperature is above 0; None: no
        row. n_top: how many likeliest tokens of each row to return, for a beam search, which sets
        slots itself.
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
        advance(self._slots.table, rows, tokens, rules.eot, rules.timestamp_begin)
        if not n_top:
            return Sampled(tokens, logprobs)
        top, top_tokens = logits.topk(n_top)
        return Sampled(tokens, logprobs, top_tokens, top - total[:, None])

    def _draw(self, logits: Tensor, rows: SlotRows, noisy: Tensor) -> Tensor:
        """logits: [m, n_vocab], of the noisy rows alone. Changes neither logits nor rows."""
        keys, steps = rows.noise_key[noisy], rows.history.n_sampled[noisy]
        noise = gumbel(keys, steps, logits.shape[1])
        return noise.mul_(rows.temperature[noisy][:, None]).add_(logits).argmax(-1)


def best_of(logits: Tensor, allowed: Tensor) -> Sampled:
    """The likeliest of `allowed` tokens (int64 [m]) in each row, by a softmax over them only.

    This is how Whisper detects languages. logits: [n, n_vocab], unchanged; -inf rules a token out.
    """
    chosen = logits[:, allowed]
    best, index = chosen.max(-1)
    logprobs = torch.where(torch.isfinite(best), best - chosen.logsumexp(-1), NEVER)
    return Sampled(allowed[index], logprobs)


_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: steps through all 64-bit values
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOKEN_STEP = 0x9E3779B9
_HASH_1, _HASH_2 = 0x7FEB352D, 0x846CA68B


def noise_key(seed: int, window: int, attempt: int, candidate: int) -> int:
    """64-bit key of one candidate of one attempt, as a signed integer for an int64 tensor.

    `attempt` counts temperature fallbacks, not retries, since a retry must give the same text.
    """
    key = 0
    for part in (seed, window, attempt, candidate):
        key = _mix64_int((key ^ (part & _MASK64)) + _GOLDEN)
    return _signed(key, 64)


def gumbel(keys: Tensor, steps: Tensor, n_vocab: int) -> Tensor:
    """Gumbel noise of keys and steps (tokens sampled before), int64 [n]: float32 [n, n_vocab]."""
    bits = random_bits(keys, steps, n_vocab) & 0x7FFF_FFFF
    # Small values keep their full precision, and these are the ones that win: -log(1 - u) is
    # exponential, and its negative logarithm is Gumbel. The clamp keeps all values finite.
    u = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def random_bits(keys: Tensor, steps: Tensor, n_vocab: int) -> Tensor:
    mixed = _mix64(keys + (steps + 1) * _signed(_GOLDEN, 64))
    low, high = (_low32(half).unsqueeze(1) for half in (mixed, mixed >> 32))
    tokens = torch.arange(n_vocab, dtype=torch.int32, device=keys.device)
    x = tokens * _signed(_TOKEN_STEP, 32) + low  # [n, n_vocab]
    return _hash32_(_hash32_(x).add_(high))


def _mix64(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30, 64)) * _signed(_MIX_1, 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(_MIX_2, 64)
    return x ^ _shift_right(x, 31, 64)


def _mix64_int(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK64
    return x ^ (x >> 31)


def _hash32_(x: Tensor) -> Tensor:
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(_signed(_HASH_1, 32))
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(_signed(_HASH_2, 32))
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def _shift_right(x: Tensor, by: int, width: int) -> Tensor:
    """Logical shift; torch's own keeps the sign bit."""
    return (x >> by).bitwise_and_((1 << (width - by)) - 1)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64 tensor as int32, without a cast that overflows."""
    return (((x & 0xFFFF_FFFF) ^ 0x8000_0000) - 0x8000_0000).to(torch.int32)


def _signed(x: int, width: int) -> int:
    return x - (1 << width) if x >> (width - 1) else x

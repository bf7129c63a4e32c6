"""Sampling noise as a function of its place alone: no generator, no state, no order.

The bits for one token are a hash of (seed, window, attempt, candidate, step, token). Only integer
operations that wrap make them, so they are the same on any device, in any batch, after any
retry on another worker. The float steps after it (two logarithms) may differ in the last place
between devices, as the logits do.

The key is mixed with splitmix64's finalizer (Steele, Lea, Flood 2014), the token with a 32-bit
multiply-xorshift hash of low bias (constants found by Wellons' hash-prospector), applied twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: steps through all 64-bit values
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_TOKEN_STEP = 0x9E3779B9
_HASH_1, _HASH_2 = 0x7FEB352D, 0x846CA68B


def noise_key(seed: int, window: int, attempt: int, candidate: int) -> int:
    """64-bit key of one candidate of one attempt, as a signed integer for an int64 tensor.

    `attempt` counts temperature fallbacks of a window. It does not count the workers that the
    window was sent to: another delivery must give the same text.
    """
    key = 0
    for part in (seed, window, attempt, candidate):
        key = _mix64_int((key ^ (part & _MASK64)) + _GOLDEN)
    return _signed(key, 64)


def gumbel(keys: Tensor, steps: Tensor, n_vocab: int) -> Tensor:
    """Standard Gumbel noise for every token of the vocabulary.

    Adding it to logits / temperature and taking the argmax samples from their softmax.

    Args:
        keys: int64 [n], from `noise_key`.
        steps: int64 [n], tokens sampled before this step.

    Returns:
        float32 [n, n_vocab] on the keys' device, all finite (about -2.9 to 22.2).
    """
    bits = random_bits(keys, steps, n_vocab) & 0x7FFF_FFFF
    # Small values keep their full precision, and these are the ones that win: -log(1 - u) is
    # exponential, and its negative logarithm is Gumbel.
    u = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def random_bits(keys: Tensor, steps: Tensor, n_vocab: int) -> Tensor:
    """int32 [n, n_vocab] of uniform bits; arguments as in `gumbel`."""
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
    """In place, int32."""
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(_signed(_HASH_1, 32))
    x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(_signed(_HASH_2, 32))
    return x.bitwise_xor_(_shift_right(x, 16, 32))


def _shift_right(x: Tensor, by: int, width: int) -> Tensor:
    """Logical shift: torch's own carries the sign bit along."""
    return (x >> by).bitwise_and_((1 << (width - by)) - 1)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64 tensor as int32, without relying on a cast that overflows."""
    return (((x & 0xFFFF_FFFF) ^ 0x8000_0000) - 0x8000_0000).to(torch.int32)


def _signed(x: int, width: int) -> int:
    return x - (1 << width) if x >> (width - 1) else x

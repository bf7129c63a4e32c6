"""Predict a GPU's time for a window and for a decode step, from a rate for each kind of work.

Each kind has its own limit: exponentials for attention with heads of 64, memory for norms and GELU,
and the latency of kernels for a decode step of few rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmark.shared.flops import FRAMES, ITEM_BYTES, START_TOKENS, projection_flops
from tests.support.checkpoints import ModelShape

LAYER_KERNELS = 13 + 2  # of a decode step; flashinfer merges its two attentions' parts
OTHER_KERNELS = 10  # of a step: embedding, norm, head, sampling
KERNEL_S = 4.1e-6  # of each, besides its bytes; fitted to steps of one row on an H200
KV_SHARE = 0.85  # of a copy's rate that paged attention reaches; fitted to 64 rows on an H200


@dataclass(frozen=True, slots=True)
class Gpu:
    """`product_flops` has FLOP/s by the number of summands (K). `bytes_per_s` counts what a copy
    reads and what it writes. `mel_s` is the time of a window's features.
    """

    product_flops: Mapping[int, float]
    attention_flops: float
    bytes_per_s: float
    mel_s: float = 0.1e-3

    def encode_parts_s(self, shape: ModelShape) -> dict[str, float]:
        """Return the seconds of one window, with the projection to cross-attention's KV."""
        d, t, layers = shape.d_model, FRAMES, shape.encoder_layers
        convolutions = 2.0 * 3 * (2 * t * shape.n_mels * d + t * d * d)
        narrow = layers * 16.0 * d * d * t + projection_flops(shape) + convolutions
        return {
            "products": narrow / self._rate(d) + layers * 8.0 * d * d * t / self._rate(4 * d),
            "attention": layers * 4.0 * t * t * d / self.attention_flops,
            # Two norms that read x and what is added, and write both; GELU of 4 * d numbers.
            "norms and GELU": layers * 16.0 * t * d * ITEM_BYTES / self.bytes_per_s,
            "mel": self.mel_s,
        }

    def encode_s(self, shape: ModelShape) -> float:
        return sum(self.encode_parts_s(shape).values())

    def step_parts_s(self, shape: ModelShape, n_tokens: int, batch: int) -> dict[str, float]:
        """Return the seconds of a decode step of `batch` sequences halfway through `n_tokens`."""
        layers, d = shape.decoder_layers, shape.d_model
        weights = 14 * layers * d**2 + shape.n_vocab * d
        kv = 2 * layers * d * (FRAMES + START_TOKENS + 1 + n_tokens / 2)
        return {
            "weights": ITEM_BYTES * weights / self.bytes_per_s,
            "KV": ITEM_BYTES * batch * kv / (KV_SHARE * self.bytes_per_s),
            "kernels": (layers * LAYER_KERNELS + OTHER_KERNELS) * KERNEL_S,
        }

    def step_s(self, shape: ModelShape, n_tokens: int, batch: int) -> float:
        return sum(self.step_parts_s(shape, n_tokens, batch).values())

    def windows_per_s(self, shape: ModelShape, n_tokens: int, batch: int) -> float:
        """Assume that encoding and decoding take turns; both at once were no faster on an H200."""
        steps = n_tokens / batch
        return 1 / (self.encode_s(shape) + steps * self.step_s(shape, n_tokens, batch))

    def _rate(self, k: int) -> float:
        return self.product_flops[min(self.product_flops, key=lambda known: abs(known - k))]


# As `Rig.measure_rates` found them on 27 November 2026.
H200 = Gpu({1280: 700e12, 5120: 760e12}, 370e12, 4.24e12)

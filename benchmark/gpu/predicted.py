"""What a GPU takes of a window and of a decode step, by a rate for each kind of work.

No single rate will do: a product of 12,000 rows that sums up 1280 numbers reaches four fifths of
what one of 8192^3 does, attention with heads of 64 is bound by its exponentials, norms and GELU by
memory, and a decode step of few rows by its launches. `Rig.measure_rates` fills the rates there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmark.shared.flops import FRAMES, ITEM_BYTES, START_TOKENS, projection_flops
from tests.support.checkpoints import ModelShape

FEW_ROWS = 32  # decode steps of so many have fewer kernels (`decoder_worker.gpu.decoder`)
LAYER_KERNELS, MORE_ROWS_KERNELS = 9 + 2, 12 + 2  # flashinfer merges its two attentions' parts
OTHER_KERNELS = 10  # of a step: embedding, norm, head, sampling
KV_SHARE = 0.85  # of the memory's rate that paged attention reaches
CTA_S = 15e-6  # of a tile of the encoder's products, which a decode kernel waits for beside them


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates for each kind of work.

    product_flops: of the encoder's products, by the numbers that each sums up (K), per second.
    attention_flops: of its attention. bytes_per_s: of a copy, counted twice. launch_s: of a kernel
    in a graph, beside its bytes. mel_s: of a window's features.
    """

    product_flops: Mapping[int, float]
    attention_flops: float
    bytes_per_s: float
    launch_s: float
    mel_s: float = 0.1e-3

    def encode_parts_s(self, shape: ModelShape) -> dict[str, float]:
        """Of one window, with the projection to cross-attention's KV."""
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
        """Of one decode step of `batch` sequences in the middle of a text of `n_tokens`."""
        layers, d = shape.decoder_layers, shape.d_model
        weights = 14 * layers * d**2 + shape.n_vocab * d
        kv = 2 * layers * d * (FRAMES + START_TOKENS + 1 + n_tokens / 2)
        return {
            "weights": ITEM_BYTES * weights / self.bytes_per_s,
            "KV": ITEM_BYTES * batch * kv / (KV_SHARE * self.bytes_per_s),
            "launches": kernels(shape, batch) * self.launch_s,
        }

    def step_s(self, shape: ModelShape, n_tokens: int, batch: int) -> float:
        return sum(self.step_parts_s(shape, n_tokens, batch).values())

    def windows_per_s(self, shape: ModelShape, n_tokens: int, batch: int) -> tuple[float, float]:
        """Where encoding and decoding take turns, and where both run at once.

        At once each kernel of a step waits for a tile of the encoder's, since no two of their
        blocks fit a multiprocessor and priorities preempt none.
        """
        encode_s, step_s = self.encode_s(shape), self.step_s(shape, n_tokens, batch)
        steps = n_tokens / batch
        waiting_s = kernels(shape, batch) * CTA_S
        return 1 / (encode_s + steps * step_s), 1 / max(encode_s, steps * (step_s + waiting_s))

    def _rate(self, k: int) -> float:
        return self.product_flops[min(self.product_flops, key=lambda known: abs(known - k))]


def kernels(shape: ModelShape, batch: int) -> int:
    """Of a decode step."""
    each = LAYER_KERNELS if batch <= FEW_ROWS else MORE_ROWS_KERNELS
    return shape.decoder_layers * each + OTHER_KERNELS


# By arithmetic and what others measured, until a device says otherwise.
H200 = Gpu({1280: 640e12, 5120: 720e12}, 450e12, 4.3e12, 2.8e-6)

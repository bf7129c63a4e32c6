"""The least time that a GPU can take for Whisper, and what is predicted for the code as it is.

    python -m benchmark.gpu.roofline [--launch-us 2.0]

The least time is operations over the device's rate, or bytes over its bandwidth.
Counts matrix products and attention of the encoder as operations, weights and KV that a decode step
reads as bytes; whatever else a kernel does is free. So no program is faster, and the distance to
it is what there is to gain. The formulas know shapes and two rates, no torch.

The prediction adds up the kernels that `benchmark.gpu.launches` counts in the served code, each
with the time that a kernel takes however little it does. That time is assumed: 2 us within a CUDA
graph. Nothing of it has been measured on a GPU. Live sessions follow from both, if each of them
is spoken into all the time and updated once a second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from benchmark.shared.command import make_parser
from benchmark.shared.flops import FRAMES, encoder_flops, projection_flops
from tests.support.checkpoints import ModelShape

PROMPT_TOKENS = 4
ITEM_BYTES = 2  # of every number: weights and KV are in 16 bit


@dataclass(frozen=True, slots=True)
class Gpu:
    """flops: of a dense bf16 matrix product, per second; bytes_per_s: of its memory.

    cached_per_s: bytes of its second-level cache.
    """

    flops: float
    bytes_per_s: float
    cached_per_s: float = 5.5e12


H200 = Gpu(790e12, 4.3e12)  # as measured, not the data sheet's 989e12 and 4.8e12
H100 = Gpu(790e12, 3.0e12)  # the same chip with slower memory: the same share of 3.35e12
LAUNCH_S = 2e-6


@dataclass(frozen=True, slots=True)
class Work:
    """tokens: decode steps of a window; batch: sequences in a step."""

    tokens: int
    batch: int


@dataclass(frozen=True, slots=True)
class Live:
    """What one update of a live session decodes, as it was counted with a hop of a second.

    forced: tokens that one forward takes, the confirmed ones and the prompt. steps: tokens sampled
    behind them. rows: updates that are decoded together.
    """

    forced: float = 11.0
    steps: float = 3.4
    rows: int = 32


def weight_bytes(shape: ModelShape) -> float:
    """Of the decoder, read once in each step whatever the batch."""
    parameters = 14 * shape.decoder_layers * shape.d_model**2 + shape.n_vocab * shape.d_model
    return ITEM_BYTES * parameters


def kv_bytes(shape: ModelShape, positions: float) -> float:
    """Keys and values of all decoder layers at so many positions."""
    return ITEM_BYTES * 2 * shape.decoder_layers * positions * shape.d_model


def step_bytes(shape: ModelShape, work: Work) -> float:
    """Of one decode step in the middle of the text."""
    seen = PROMPT_TOKENS + work.tokens / 2
    return weight_bytes(shape) + work.batch * kv_bytes(shape, FRAMES + seen)


def encode_s(shape: ModelShape, gpu: Gpu) -> float:
    """Of one window: the encoder, and the projection to cross-attention's KV."""
    return (encoder_flops(shape) + projection_flops(shape)) / gpu.flops


def step_s(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    return step_bytes(shape, work) / gpu.bytes_per_s


def decode_s(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    """Of one window, its share of each of its steps."""
    return work.tokens * step_s(shape, gpu, work) / work.batch


def live_update_s(
    shape: ModelShape, gpu: Gpu, encoder_s: float, one_step_s: float, positions: int, live: Live
) -> tuple[float, float]:
    """Seconds of the encoder and of the decoder for one update of a live session.

    Args:
        encoder_s: of its window, from features to states. one_step_s: of a step of `live.rows`.
    """
    projected_s = projection_flops(shape) * positions / FRAMES / gpu.flops
    forced_s = live.forced * weight_bytes(shape) / gpu.flops  # two operations for two bytes
    decoder_s = (1 + live.steps) * one_step_s / live.rows + forced_s
    return encoder_s + projected_s, decoder_s


def time_sliced(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    """Windows per second where the halves take turns."""
    return 1 / (encode_s(shape, gpu) + decode_s(shape, gpu, work))


def overlapped(shape: ModelShape, gpu: Gpu, work: Work) -> float:
    """Windows per second where arithmetic and memory traffic overlap fully."""
    return 1 / max(encode_s(shape, gpu), decode_s(shape, gpu, work))


def predicted_s(launches: Iterable[tuple[float, float, float]], gpu: Gpu, launch_s: float) -> float:
    """Of kernels one after the other: bytes, bytes from the cache, operations of each."""
    return sum(
        launch_s + max(n_bytes / gpu.bytes_per_s, cached / gpu.cached_per_s, flops / gpu.flops)
        for n_bytes, cached, flops in launches
    )


def main() -> None:
    from benchmark.gpu.predictions import print_predictions  # imports torch

    parser = make_parser(__doc__)
    parser.add_argument(
        "--launch-us", type=float, default=1e6 * LAUNCH_S, help="assumed of every kernel"
    )
    print_predictions(H200, parser.parse_args().launch_us / 1e6)


if __name__ == "__main__":
    main()

"""The least time that a GPU can take for Whisper: operations over its rate, bytes over bandwidth.

Counts matrix products and attention of the encoder as operations, weights and KV that a decode step
reads as bytes; whatever else a kernel does is free. So no program is faster, and the distance to
it is what there is to gain. Knows shapes and two rates, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

N_FRAMES = 1500  # encoder positions of a window
PROMPT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """What the counts depend on: width, layers of both halves, mel bins, vocabulary."""

    d: int
    encoder_layers: int
    decoder_layers: int
    n_mels: int
    n_vocab: int


LARGE_V3 = Shape(1280, 32, 32, 128, 51_866)
TURBO = Shape(1280, 32, 4, 128, 51_866)


@dataclass(frozen=True, slots=True)
class Gpu:
    """flops: of a dense bf16 matrix product, per second; bytes_per_s: of its memory."""

    flops: float
    bytes_per_s: float


H200 = Gpu(790e12, 4.3e12)  # as measured, not the data sheet's 989e12 and 4.8e12


@dataclass(frozen=True, slots=True)
class Work:
    """tokens: decode steps of a window; batch: sequences in a step.

    kv_frames, encoded_frames: of the 1500, where either is cut to the audio's length.
    kv_item, self_item: bytes of a number in cross- and self-attention KV; all others have two.
    """

    tokens: int
    batch: int
    kv_frames: int = N_FRAMES
    encoded_frames: int = N_FRAMES
    kv_item: int = 2
    self_item: int = 2


def encoder_flops(shape: Shape, frames: int = N_FRAMES) -> float:
    d, t = shape.d, frames
    conv = 2 * 2 * t * d * shape.n_mels * 3 + 2 * t * d * d * 3
    return conv + shape.encoder_layers * (24 * d * d * t + 4 * t * t * d)


def projection_flops(shape: Shape, frames: int = N_FRAMES) -> float:
    return 4 * shape.decoder_layers * frames * shape.d**2


def weight_bytes(shape: Shape) -> float:
    """Of the decoder, read once in each step whatever the batch."""
    return 2 * (14 * shape.decoder_layers * shape.d**2 + shape.n_vocab * shape.d)


def cross_kv_bytes(shape: Shape, frames: int = N_FRAMES, item: int = 2) -> float:
    return 2 * shape.decoder_layers * frames * shape.d * item


def states_bytes(shape: Shape) -> float:
    return N_FRAMES * shape.d * 2


def step_bytes(shape: Shape, work: Work) -> float:
    """Of one decode step in the middle of the text."""
    seen = PROMPT_TOKENS + work.tokens / 2
    self_kv = 2 * shape.decoder_layers * seen * shape.d * work.self_item
    cross = cross_kv_bytes(shape, work.kv_frames, work.kv_item)
    return weight_bytes(shape) + work.batch * (cross + self_kv)


def encode_s(shape: Shape, gpu: Gpu, frames: int = N_FRAMES) -> float:
    return encoder_flops(shape, frames) / gpu.flops


def projection_s(shape: Shape, gpu: Gpu, frames: int = N_FRAMES) -> float:
    return projection_flops(shape, frames) / gpu.flops


def step_s(shape: Shape, gpu: Gpu, work: Work) -> float:
    return step_bytes(shape, work) / gpu.bytes_per_s


def decode_s(shape: Shape, gpu: Gpu, work: Work) -> float:
    """Of one window, its share of each of its steps."""
    return work.tokens * step_s(shape, gpu, work) / work.batch


def time_sliced(shape: Shape, gpu: Gpu, work: Work) -> float:
    """Windows per second where the halves take turns."""
    return 1 / (_encoder_s(shape, gpu, work) + decode_s(shape, gpu, work))


def overlapped(shape: Shape, gpu: Gpu, work: Work) -> float:
    """Windows per second where arithmetic and memory traffic overlap fully."""
    return 1 / max(_encoder_s(shape, gpu, work), decode_s(shape, gpu, work))


def _encoder_s(shape: Shape, gpu: Gpu, work: Work) -> float:
    frames = work.encoded_frames
    return encode_s(shape, gpu, frames) + projection_s(shape, gpu, min(frames, work.kv_frames))

"""Writes the predicted profiles of `splitscribe simulate`: large-v3 and turbo on three GPUs.

    python -m benchmark.gpu.planning_profiles [--folder cluster/planning/profiles]

Each forward is what `benchmark.gpu.roofline` counts in the served code, at the GPU's rates: of an
H200 as they were measured elsewhere, and for the others the same share of the data sheet. A
kernel takes 2 us at least. Links and start times are assumed, and router and audio are the two
cores' as measured. None of it was measured on a GPU, and the profiles say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmark.gpu.launches import count
from benchmark.gpu.meta_models import dims_of, encode
from benchmark.gpu.predictions import predict_step
from benchmark.gpu.roofline import H200, LAUNCH_S, Gpu, predicted_s
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.flops import FRAMES, projection_flops
from benchmark.shared.shapes import SHAPES
from cluster.kv.layout_for import GPU_PAGE_FRAMES
from cluster.planning.profile.model import (
    DecoderProfile,
    EncodePoint,
    EncoderProfile,
    LinkProfile,
    Profile,
    Shape,
    StartProfile,
    StepPoint,
)
from cluster.planning.profile.shipped import FOLDER, load_profile, save_profile
from tests.support.checkpoints import ModelShape

# The share of the data sheet's rates that an H200 was measured to reach (`benchmark.gpu.roofline`).
FLOPS_SHARE, BYTES_SHARE = 790 / 989, 4.3 / 4.8
NVLINK = LinkProfile(transport="assumed: cuda_ipc", latency_s=100e-6, bytes_per_s=80e9)
PCIE = LinkProfile(transport="assumed: PCIe 4 x16", latency_s=100e-6, bytes_per_s=22e9)
MODELS = ("large-v3", "large-v3-turbo")
ROWS = (1, 8, 32, 64)
BATCHES = (1, 2, 4, 8)
SHORT = 350  # encoder positions of a trimmed window
KV_BATCHES = 2  # of rows, that the decoder's pool holds
EXPORT_BATCHES = 4
START_S = 40.0  # to load the weights and to capture graphs: assumed


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: its data sheet's dense bf16 rate and memory bandwidth, and its link."""

    flops: float
    bytes_per_s: float
    link: LinkProfile

    def rates(self) -> Gpu:
        return Gpu(FLOPS_SHARE * self.flops, BYTES_SHARE * self.bytes_per_s)


CARDS = {
    "h200": Card(H200.flops / FLOPS_SHARE, H200.bytes_per_s / BYTES_SHARE, NVLINK),
    "h100": Card(989e12, 3.35e12, NVLINK),
    "l40s": Card(362e12, 0.864e12, PCIE),
}


def predicted(model: str, card_name: str) -> Profile:
    """The profile of one model on one GPU."""
    shape, card, own = SHAPES[model], CARDS[card_name], load_profile("two-cores")
    gpu = card.rates()
    steps = tuple(
        StepPoint(
            rows=rows,
            positions=positions,
            seconds=predict_step(model, rows, positions, gpu, LAUNCH_S).after_s,
        )
        for rows in ROWS
        for positions in (SHORT, FRAMES)
    )
    return Profile(
        name=f"{model}-{card_name}",
        predicted=True,
        source="python -m benchmark.gpu.planning_profiles: kernels and bytes of the served code "
        f"at {gpu.flops / 1e12:.0f} TFLOP/s and {gpu.bytes_per_s / 1e12:.2f} TB/s, 2 us a kernel; "
        "links, start times, router and audio assumed",
        machine={"gpu": card_name},
        model=model,
        shape=Shape.of(dims_of(model)),
        kv_dtype="bfloat16",
        page_frames=GPU_PAGE_FRAMES,
        encoder=EncoderProfile(
            points=tuple(_encodes(model, shape, gpu)),
            max_batch=max(BATCHES),
            export_windows=EXPORT_BATCHES * max(BATCHES),
            overlaps=True,
        ),
        decoder=DecoderProfile(
            steps=steps,
            prefills=steps,  # a prompt of four tokens reads the same weights and the same KV
            max_batch=max(ROWS),
            kv_windows=KV_BATCHES * max(ROWS),
            steps_ahead=1,
            projection_s=projection_flops(shape) / gpu.flops,
        ),
        handoff=card.link,
        router=own.router,
        audio=own.audio,
        start_s=StartProfile(encoder=START_S, decoder=START_S, router=own.start_s.router),
    )


def _encodes(model: str, shape: ModelShape, gpu: Gpu) -> list[EncodePoint]:
    """Batches of whole windows as counted, with the projection, and of short ones by operations."""
    points = []
    for batch in BATCHES:
        encode_s = predicted_s(count(encode(model, batch, "fused")).launches, gpu, LAUNCH_S)
        whole_s = encode_s + batch * projection_flops(shape) / gpu.flops
        share = _layer_flops(shape, SHORT) / _layer_flops(shape, FRAMES)
        points.append(EncodePoint(batch=batch, positions=FRAMES, seconds=whole_s))
        points.append(EncodePoint(batch=batch, positions=SHORT, seconds=share * whole_s))
    return points


def _layer_flops(shape: ModelShape, positions: int) -> float:
    d = shape.d_model
    return float(24 * d * d * positions + 4 * positions * positions * d)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder
    written = []
    for model in MODELS:
        for card in CARDS:
            profile = predicted(model, card)
            save_profile(profile, folder / f"{profile.name}.json")
            step = profile.decoder.steps[-1]
            window_s = profile.encoder.points[-2].seconds / max(BATCHES)
            print(
                f"{profile.name}: {1000 * window_s:.2f} ms a window encoded, "
                f"{1000 * step.seconds:.2f} ms a step of {step.rows} rows"
            )
            written.append(profile.name)
    print_result("gpu.planning_profiles", {"written": written})


if __name__ == "__main__":
    main()

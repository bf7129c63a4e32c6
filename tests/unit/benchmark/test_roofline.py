"""The formulas give the figures that the design's limits were taken from."""

from __future__ import annotations

import pytest

from benchmark.gpu import roofline
from benchmark.gpu.roofline import H200, Work
from benchmark.shared.flops import FRAMES, encoder_flops, projection_flops
from benchmark.shared.shapes import SHAPES

LARGE_V3, TURBO = SHAPES["large-v3"], SHAPES["large-v3-turbo"]


def test_one_window_of_either_model() -> None:
    assert encoder_flops(LARGE_V3) == pytest.approx(2274e9, rel=1e-3)
    assert encoder_flops(LARGE_V3) / H200.flops == pytest.approx(2.878e-3, rel=1e-3)
    assert projection_flops(LARGE_V3) / H200.flops == pytest.approx(0.398e-3, rel=2e-3)
    assert projection_flops(TURBO) / H200.flops == pytest.approx(0.050e-3, rel=0.01)
    assert roofline.weight_bytes(LARGE_V3) == pytest.approx(1.60e9, rel=2e-3)
    assert roofline.weight_bytes(TURBO) == pytest.approx(0.316e9, rel=2e-3)
    assert roofline.kv_bytes(LARGE_V3, FRAMES) == pytest.approx(245.8e6, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "tokens", "limits"),
    [
        ("large-v3", 20, {1: (84, 116), 16: (204, 305), 64: (220, 305), 256: (224, 305)}),
        ("large-v3", 120, {1: (18.1, 19), 16: (75.6, 101), 64: (89.9, 127)}),
        ("large-v3-turbo", 20, {1: (220, 342), 64: (323, 342), 256: (325, None)}),
        ("large-v3-turbo", 120, {1: (79, 103), 16: (229, None), 64: (253, 342)}),
    ],
)
def test_the_limits_of_one_h200(
    model: str, tokens: int, limits: dict[int, tuple[float, float | None]]
) -> None:
    """Windows per second, taking turns and overlapped, by batch."""
    for batch, (sliced, together) in limits.items():
        work = Work(tokens, batch)
        assert roofline.time_sliced(SHAPES[model], H200, work) == pytest.approx(sliced, rel=0.006)
        if together is not None:
            assert roofline.overlapped(SHAPES[model], H200, work) == pytest.approx(
                together, rel=0.006, abs=0.6
            )

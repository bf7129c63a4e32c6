"""The formulas give the figures that the design's limits were taken from."""

from __future__ import annotations

import pytest

from benchmark.gpu import roofline
from benchmark.gpu.roofline import H200, LARGE_V3, TURBO, Shape, Work


def test_one_window_of_either_model() -> None:
    assert roofline.encoder_flops(LARGE_V3) == pytest.approx(2274e9, rel=1e-3)
    assert roofline.encode_s(LARGE_V3, H200) == pytest.approx(2.878e-3, rel=1e-3)
    assert roofline.projection_s(LARGE_V3, H200) == pytest.approx(0.398e-3, rel=2e-3)
    assert roofline.projection_s(TURBO, H200) == pytest.approx(0.050e-3, rel=0.01)
    assert roofline.weight_bytes(LARGE_V3) == pytest.approx(1.60e9, rel=2e-3)
    assert roofline.weight_bytes(TURBO) == pytest.approx(0.316e9, rel=2e-3)
    assert roofline.cross_kv_bytes(LARGE_V3) == pytest.approx(245.8e6, rel=1e-3)
    assert roofline.cross_kv_bytes(TURBO, item=1) == pytest.approx(15.4e6, rel=3e-3)
    assert roofline.states_bytes(LARGE_V3) == 3.84e6


SHORT, LONG = 20, 120


@pytest.mark.parametrize(
    ("shape", "tokens", "options", "limits"),
    [
        (LARGE_V3, SHORT, {}, {1: (84, 116), 16: (204, 305), 64: (220, 305), 256: (224, 305)}),
        (LARGE_V3, SHORT, {"kv_item": 1, "self_item": 1}, {1: (88, None), 64: (252, None)}),
        (LARGE_V3, SHORT, {"kv_frames": 350}, {16: (269, 337), 64: (297, 337)}),
        (LARGE_V3, LONG, {}, {1: (18.1, 19), 16: (75.6, 101), 64: (89.9, 127)}),
        (LARGE_V3, LONG, {"kv_item": 1, "self_item": 1}, {64: (133, 234), 256: (142, None)}),
        (TURBO, SHORT, {}, {1: (220, 342), 64: (323, 342), 256: (325, None)}),
        (TURBO, LONG, {}, {1: (79, 103), 16: (229, None), 64: (253, 342)}),
        (
            TURBO,
            SHORT,
            {"kv_frames": 350, "encoded_frames": 478},
            {16: (1048, None), 64: (1130, 1209)},
        ),
    ],
)
def test_the_limits_of_one_h200(
    shape: Shape, tokens: int, options: dict[str, int], limits: dict[int, tuple[float, float]]
) -> None:
    """Windows per second, taking turns and overlapped, by batch."""
    for batch, (sliced, together) in limits.items():
        work = Work(tokens, batch, **options)
        assert roofline.time_sliced(shape, H200, work) == pytest.approx(sliced, rel=0.006)
        if together is not None:
            assert roofline.overlapped(shape, H200, work) == pytest.approx(
                together, rel=0.006, abs=0.6
            )

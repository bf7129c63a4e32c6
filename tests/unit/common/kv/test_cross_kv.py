"""Projected KV lands in its pages, whatever their size, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from cluster.common.errors import ConfigurationError
from cluster.common.kernels.gpu.operators import page_table, scatter_pages, stored_as
from cluster.common.kv.connect import kv_layout, served_kv_layout
from cluster.common.kv.cross_kv import CrossKVProjection
from cluster.common.kv.layout import FLOAT8
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.device import resolve_dtype
from cluster.common.settings_sources import load_settings
from tests.support.checkpoints import cached_checkpoint

UNTOUCHED = -7.0


@pytest.fixture
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(cached_checkpoint()))


def gather(pool: torch.Tensor, pages: list[int], frames: int) -> torch.Tensor:
    """Frame by frame from the pages: [frames, L, 2, H, Dh]."""
    size = pool.shape[3]
    return torch.stack([pool[pages[t // size], :, :, t % size] for t in range(frames)])


@pytest.mark.parametrize("page_frames", [1500, 750, 125, 50, 1])
def test_every_page_size_holds_the_same_kv(checkpoint: Checkpoint, page_frames: int) -> None:
    layout = kv_layout(checkpoint, page_frames)
    projection = CrossKVProjection(checkpoint)
    states = torch.randn(2, 1500, 32, generator=torch.Generator().manual_seed(1))
    n_own = layout.pages_per_window
    order = torch.randperm(2 * n_own + 1, generator=torch.Generator().manual_seed(2)).tolist()
    pages = [order[:n_own], order[n_own : 2 * n_own]]
    pool = torch.full((2 * n_own + 1, *layout.page_shape), UNTOUCHED)
    projection.write(states, pool, pages)
    expected = projection.project(states)
    for window, own in enumerate(pages):
        largest = (gather(pool, own, 1500) - expected[window]).abs().max().item()
        assert largest < 1e-5, f"window {window} differs by {largest}"
    assert (pool[order[-1]] == UNTOUCHED).all()


@pytest.mark.parametrize("page_frames", [1500, 125])
def test_weights_in_8_bits_give_nearly_the_same_kv(
    checkpoint: Checkpoint, page_frames: int
) -> None:
    layout = kv_layout(checkpoint, page_frames)
    states = torch.randn(1, 1500, 32, generator=torch.Generator().manual_seed(4))
    pool = torch.zeros(layout.pages_per_window, *layout.page_shape)
    pages = list(range(layout.pages_per_window))
    CrossKVProjection(checkpoint, int8=True).write(states, pool, [pages])
    exact = CrossKVProjection(checkpoint).project(states)[0]
    error = (gather(pool, pages, 1500) - exact).norm() / exact.norm()
    assert 0 < error < 0.02


def test_a_last_page_is_filled_partly() -> None:
    """10 frames in pages of 4: the third page gets 2, and its rest stays."""
    kv = torch.randn(2, 10, 3, 2, 2, 4)
    pool = torch.full((7, 3, 2, 4, 2, 4), UNTOUCHED)
    pages = [[6, 0, 2], [1, 5, 4]]
    scatter_pages(kv, pool, page_table(pages, pool.device))
    for window, own in enumerate(pages):
        assert torch.equal(gather(pool, own, 10), kv[window])
        assert (pool[own[2], :, :, 2:] == UNTOUCHED).all()
    assert (pool[3] == UNTOUCHED).all()


@pytest.mark.parametrize("page_frames", [1500, 125])
def test_a_pool_of_8_bit_floats_saturates(checkpoint: Checkpoint, page_frames: int) -> None:
    layout = kv_layout(checkpoint, page_frames, FLOAT8)
    states = torch.randn(1, 1500, 32, generator=torch.Generator().manual_seed(3))
    states[0, 1:3] *= 1e5
    pool = torch.zeros((layout.pages_per_window, *layout.page_shape), dtype=torch.float8_e4m3fn)
    projection = CrossKVProjection(checkpoint)
    pages = list(range(layout.pages_per_window))
    projection.write(states, pool, [pages])
    exact = projection.project(states)[0]
    found = gather(pool.float(), pages, 1500)
    assert exact.abs().max() > 448
    assert found.abs().max() == 448
    error = (found - exact.clamp(-448, 448)).abs()
    # Half a unit of the last of 3 mantissa bits; below 2**-6 the numbers stand 2**-9 apart.
    assert (error <= (exact.abs() * 2**-4).clamp(min=2**-10)).all()
    assert stored_as(torch.tensor([torch.nan]), torch.float8_e4m3fn).float().isnan().all()


@pytest.mark.parametrize(
    ("kv_dtype", "encoder_dtype", "decoder_dtype", "expected"),
    [
        ("auto", "auto", "auto", resolve_dtype("auto", "cpu")),
        ("auto", "bfloat16", "int8", "bfloat16"),
        ("auto", "int8", "auto", resolve_dtype("int8", "cpu")),
        ("auto", "int8", "int8", FLOAT8),
        ("float32", "int8", "int8", "float32"),
        ("float16", "bfloat16", "auto", "float16"),
        ("float8", "auto", "auto", FLOAT8),
    ],
)
def test_the_setting_for_kv_overrides_what_dtypes_make_of_it(
    checkpoint: Checkpoint, kv_dtype: str, encoder_dtype: str, decoder_dtype: str, expected: str
) -> None:
    flags = {
        "kv_dtype": kv_dtype,
        "encoder": {"dtype": encoder_dtype},
        "decoder": {"dtype": decoder_dtype},
    }
    settings = load_settings(flags=flags, environ={})
    assert served_kv_layout(checkpoint, settings, "cpu").dtype == expected


@pytest.mark.parametrize("page_frames", [-1, 7, 1501])
def test_pages_that_do_not_divide_the_window_are_refused(
    checkpoint: Checkpoint, page_frames: int
) -> None:
    with pytest.raises(ConfigurationError, match="does not divide a window of 1500"):
        kv_layout(checkpoint, page_frames)

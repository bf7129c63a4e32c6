"""Products by the CPU's bfloat16 tiles are near the exact ones, for any number of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.jit.tile_registers import CONFIG_BYTES, has_bfloat16_tiles, tile_config
from cluster.model.checkpoint import open_checkpoint
from decoder_worker.cpu.tile_blocks import BLOCK_OUTPUTS, fits_tiles, in_blocks
from tests.support.checkpoints import ModelShape, make_checkpoint

SHARE = 2**-16  # of a sum's terms, by which splitting a row into two bfloat16 may be off


@pytest.mark.skipif(not has_bfloat16_tiles(), reason="needs a CPU with AMX's bfloat16")
@pytest.mark.parametrize("n_in", [32, 512, 2048])
@pytest.mark.parametrize("n_out", [BLOCK_OUTPUTS, 4 * BLOCK_OUTPUTS, 2 * BLOCK_OUTPUTS + 25])
@pytest.mark.parametrize("n_rows", [1, 8, 9])
def test_products_are_near_the_exact_ones(n_rows: int, n_out: int, n_in: int) -> None:
    """And the same, bit for bit, whether the weights lie in rows or in blocks."""
    generator = torch.Generator().manual_seed(n_rows * n_out + n_in)
    weight = torch.randn(n_out, n_in, generator=generator).bfloat16()
    x = torch.randn(n_rows, n_in, generator=generator)
    scale = torch.rand(n_out, generator=generator) + 0.5
    bits = weight.view(torch.uint16).numpy()
    out = _product(x, bits, scale)
    exact = scale * (x.double() @ weight.double().t())
    terms = scale * (x.double().abs() @ weight.double().abs().t())
    off = ((out - exact).abs() / terms).max().item()
    assert off < SHARE, f"off by {off:.2e} of a sum's terms"
    if n_out % BLOCK_OUTPUTS == 0:
        assert torch.equal(_product(x, in_blocks(bits), scale), out)


def _product(x: Tensor, weight: Any, scale: Tensor) -> Tensor:
    from cluster.jit.tile_instructions import begin_tiles
    from decoder_worker.cpu import tile_products

    n_out = len(scale)
    out = np.full((len(x), n_out), np.nan, np.float32)
    begin_tiles(tile_config())
    split = tile_products.split_rows(x.numpy())
    tile_products.tile_product(split, weight, scale.numpy(), 0, n_out, out)
    _end_tiles()
    return torch.from_numpy(out)


def _end_tiles() -> None:
    from numba import njit

    from cluster.jit.tile_instructions import end_tiles

    njit(lambda: end_tiles())()


@pytest.mark.parametrize("dtype", [np.uint16, np.int8])
def test_blocks_hold_each_output_s_inputs_where_a_tile_reads_them(dtype: Any) -> None:
    n_out, n_in, width = 2 * BLOCK_OUTPUTS, 192, 64 // np.dtype(dtype).itemsize
    weight = np.random.default_rng(3).integers(0, 100, (n_out, n_in)).astype(dtype)
    blocks = in_blocks(weight)
    assert blocks.flags.c_contiguous
    assert blocks.shape == (2, n_in // width, BLOCK_OUTPUTS, width)
    for output in (0, 63, 64, 127):
        for i in (0, width - 1, width, n_in - 1):
            found = blocks[output // BLOCK_OUTPUTS, i // width, output % BLOCK_OUTPUTS, i % width]
            assert found == weight[output, i]


def test_a_configuration_names_eight_whole_tiles() -> None:
    config = tile_config()
    assert len(config) == CONFIG_BYTES
    assert config[0] == 1, "the palette"
    assert config[16:32].view(np.uint16).tolist() == [64] * 8, "bytes in a row"
    assert config[48:56].tolist() == [16] * 8, "rows"


def test_sizes_that_tiles_do_not_make_up_are_left_to_other_products(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shape = ModelShape(128, 2, 1, 1, n_vocab=2_000, n_languages=4)
    dims = open_checkpoint(str(make_checkpoint(tmp_path_factory.mktemp("model"), shape))).dims
    assert fits_tiles(dims)
    assert not fits_tiles(replace(dims, n_text_ffn=BLOCK_OUTPUTS + 32))
    assert not fits_tiles(replace(dims, n_vocab=BLOCK_OUTPUTS - 1))

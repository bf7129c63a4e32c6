"""Products by the CPU's tiles and by vectors of 8 bits are near the exact ones, for any rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

from cluster.common.kernels.cpu.tile_registers import (
    VECTORS,
    has_bfloat16_tiles,
    products_for,
    tile_config,
)
from decoder_worker.cpu import tile_products, vector_products
from decoder_worker.cpu.arrays import BLOCK_OUTPUTS, in_blocks

IN_TILES = pytest.mark.skipif(not has_bfloat16_tiles(), reason="needs a CPU with AMX's tiles")
BY_VECTORS = pytest.mark.skipif(
    products_for(bfloat16=False, int8=True) is not VECTORS, reason="needs a CPU with AVX-512 VNNI"
)
IN_8_BITS = pytest.mark.parametrize(
    "by", [pytest.param("tiles", marks=IN_TILES), pytest.param("vectors", marks=BY_VECTORS)]
)
SHARE = 2**-16  # of a sum's terms, by which splitting a row into two bfloat16 may be off


@IN_TILES
@pytest.mark.parametrize("n_in", [32, 512, 2048])
@pytest.mark.parametrize("n_out", [BLOCK_OUTPUTS, 4 * BLOCK_OUTPUTS])
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
    assert torch.equal(_product(x, in_blocks(bits), scale), out)


def _by_tiles(split: Any, product: Any, x: Tensor, weight: Any, scale: Tensor) -> Tensor:
    from cluster.common.kernels.cpu.tile_instructions import begin_tiles, end_tiles

    out = np.full((len(x), len(scale)), np.nan, np.float32)
    begin_tiles(tile_config())
    product(split(x.numpy()), weight, scale.numpy(), 0, len(scale), out)
    njit(lambda: end_tiles())()
    return torch.from_numpy(out)


def _product(x: Tensor, weight: Any, scale: Tensor) -> Tensor:
    return _by_tiles(tile_products.split_rows, tile_products.tile_product, x, weight, scale)


def _int8_product(by: str, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    blocks = in_blocks(weight.numpy())
    if by == "tiles":
        product = tile_products.int8_tile_product
        return _by_tiles(tile_products.split_in_8_bits, product, x, blocks, scale)
    out = np.full((len(x), len(scale)), np.nan, np.float32)
    rows = vector_products.split_for_vectors(x.numpy())
    vector_products.int8_vector_product(rows, blocks, scale.numpy(), 0, len(scale), out)
    return torch.from_numpy(out)


@IN_8_BITS
@pytest.mark.parametrize("n_in", [64, 512, 2048])
@pytest.mark.parametrize("n_out", [25, BLOCK_OUTPUTS, 2 * BLOCK_OUTPUTS + 25])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 8, 9])
def test_products_in_8_bits_are_near_the_exact_ones(
    n_rows: int, n_out: int, n_in: int, by: str
) -> None:
    """Within half of the finest step for each input, and what float32 rounds."""
    generator = torch.Generator().manual_seed(n_rows * n_out + n_in)
    weight = torch.randint(-127, 128, (n_out, n_in), generator=generator).to(torch.int8)
    x = torch.randn(n_rows, n_in, generator=generator)
    scale = torch.rand(n_out, generator=generator) + 0.5
    out = _int8_product(by, x, weight, scale)
    exact = scale * (x.double() @ weight.double().t())
    finest = x.abs().amax(1, keepdim=True) / (tile_products.STEPS * tile_products.FINER)
    bound = scale * weight.double().abs().sum(1) * finest / 2 + 2**-20 * exact.abs() + 1e-3
    assert ((out - exact).abs() <= bound).all()
    company = torch.cat([x[-1:], 1000 * x])[:8]
    assert torch.equal(_int8_product(by, company, weight, scale)[0], out[-1])


@IN_8_BITS
def test_rows_in_8_bits_that_are_zero_or_not_finite_leave_others_alone(by: str) -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randint(-127, 128, (BLOCK_OUTPUTS, 128), generator=generator).to(torch.int8)
    x, scale = torch.randn(6, 128, generator=generator), torch.ones(BLOCK_OUTPUTS)
    expected = _int8_product(by, x, weight, scale)
    x[1], x[2, 5], x[3, 77], x[4] = 0, torch.nan, -torch.inf, 1e-38
    out = _int8_product(by, x, weight, scale)
    assert not out[[1, 4]].any()
    assert out[[2, 3]].isnan().all()
    assert torch.equal(out[[0, 5]], expected[[0, 5]])

"""Prepared matrix products give what the plain ones give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.errors import ConfigurationError
from cluster.common.model.device import resolve_dtype
from cluster.common.model.layers import DynamicInt8, Linear, PackedLinear, packer


def make_linear(n_in: int, n_out: int, dtype: torch.dtype, *, bias: bool = True) -> Linear:
    generator = torch.Generator().manual_seed(n_in + n_out)
    weight = torch.randn(n_out, n_in, generator=generator) * n_in**-0.5
    offset = torch.randn(n_out, generator=generator).to(dtype) if bias else None
    return Linear(weight.to(dtype), offset)


def make_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("shape", [(1, 96), (7, 96), (2, 150, 96)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 0.02)])
def test_a_packed_product_is_the_plain_one(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype, most: float
) -> None:
    plain = make_linear(96, 161, dtype, bias=bias)
    packed = packer("cpu", dtype)(plain)
    is_taken = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert isinstance(packed, PackedLinear if is_taken else Linear)
    x, residual = make_rows(shape, dtype), make_rows((*shape[:-1], 161), dtype)
    for got, expected in (
        (packed(x), plain(x)),
        (packed.gelu(x), F.gelu(plain(x).float())),
        (packed.add_to(residual, x), residual + plain(x)),
    ):
        assert got.dtype == dtype
        assert got.shape == expected.shape
        assert torch.allclose(got.float(), expected.float(), rtol=most, atol=most)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_within_three_percent(dtype: torch.dtype, bias: bool) -> None:
    """Two where the CPU has VNNI. Sums that saturate, as 8 bits would without it, are 8 % off."""
    plain = make_linear(256, 161, dtype, bias=bias)
    int8 = packer("cpu", dtype, int8=True)(plain)
    assert isinstance(int8, DynamicInt8)
    x, residual = make_rows((2, 40, 256), dtype), make_rows((2, 40, 161), dtype)
    x[0, 0] *= 1000  # one loud row costs the others nothing
    for got, expected in (
        (int8(x), plain(x)),
        (int8.gelu(x), F.gelu(plain(x))),
        (int8.add_to(residual, x), residual + plain(x)),
    ):
        wrong = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
        assert wrong.max() < 0.03


def test_a_cpu_that_onednn_knows_no_bfloat16_for_has_the_plain_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert isinstance(packer("cpu", torch.bfloat16)(make_linear(8, 8, torch.bfloat16)), Linear)
    assert isinstance(packer("cpu", torch.float32)(make_linear(8, 8, torch.float32)), PackedLinear)


def test_a_residual_in_float32_stays_so() -> None:
    plain = make_linear(96, 161, torch.bfloat16)
    x, residual = make_rows((7, 96), torch.bfloat16), make_rows((7, 161), torch.float32)
    for product in (plain, packer("cpu", torch.bfloat16)(plain)):
        got = product.add_to(residual, x)
        assert got.dtype == torch.float32
        assert torch.equal(got, residual + product(x))


def test_int8_is_refused_on_a_gpu() -> None:
    with pytest.raises(ConfigurationError, match="bfloat16"):
        resolve_dtype("int8", "cuda")

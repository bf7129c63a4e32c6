"""The GPU's encoder of few kernels, by their plain twins, gives what the plain encoder gives."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from cluster.common.errors import ConfigurationError
from cluster.common.kernels.gpu.operators import TRITON, add_norm
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.device import resolve_dtype
from cluster.common.model.layers import LayerNorm, Linear, as_it_is
from cluster.common.settings_sources import load_settings
from encoder_worker.gpu.encoder import FLOAT8, Float8Linear, GpuEncoder, Scaled, check_float8
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import cached_checkpoint
from tests.support.gpu.triton_kernels import ARCHITECTURES, compiled, load_kernel
from tests.support.references.hugging_face import assert_close

SHAPES = ["micro", "tiny", pytest.param("large-v3", marks=pytest.mark.slow)]
WIDTHS = (384, 1280, 5120)
SCALED = [384, *(pytest.param(width, marks=pytest.mark.slow) for width in WIDTHS[1:])]
FRAMES = 120  # of mel: a short context


def make_encoder(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> AudioEncoder:
    """With products as a GPU has them."""
    with patch("encoder_worker.model.packer", lambda *args, **flags: as_it_is):
        return AudioEncoder(checkpoint, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_the_layers_equal_the_plain_ones(shape: str) -> None:
    """In float32, for three windows of a short context."""
    checkpoint = open_checkpoint(str(cached_checkpoint(shape)))
    mel = torch.randn(3, checkpoint.dims.n_mels, FRAMES, generator=torch.Generator().manual_seed(1))
    expected = make_encoder(checkpoint)(mel)
    made = GpuEncoder(make_encoder(checkpoint))
    assert made.dims == checkpoint.dims
    assert_close("states", made(mel), expected, share=2e-5)


@torch.inference_mode()
def test_eight_bits_are_near_and_take_half_the_memory() -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint("tiny")))
    mel = torch.randn(2, 80, FRAMES, generator=torch.Generator().manual_seed(1))
    plain = make_encoder(checkpoint, torch.bfloat16)
    expected = plain(mel)
    made = GpuEncoder(plain, float8=True)
    assert plain.layers == []  # whose weights are freed
    error = (made(mel).float() - expected.float()).norm() / expected.float().norm()
    assert 0.001 < error < 0.1, f"differs by {error}"


def test_a_product_in_eight_bits_scales_rows_and_outputs() -> None:
    """Rows and outputs of very different sizes keep their three bits; a row of zeros stays one."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.tensor([1e-3, 1.0, 300.0, 0.0])
    x = torch.randn(4, 64, generator=generator) * sizes[:, None]
    outputs = torch.logspace(-2, 2, 10)
    weight, bias = torch.randn(10, 64, generator=generator) * outputs[:, None], torch.zeros(10)
    product = Float8Linear.of(Linear(weight, bias))
    scaled = Scaled.of(x)
    assert scaled.values.dtype == FLOAT8
    assert not scaled.values.float().isnan().any()
    assert (scaled.values.float().abs().amax(-1)[:3] == 448).all()
    found, exact = product.of_scaled(scaled, bias).float(), x @ weight.t()
    gap = (found - exact).abs() / (sizes[:, None] * outputs + 1e-9)
    # Each of 64 numbers on both sides is off by up to 2^-4 of itself, with either sign.
    assert gap[:3].max() < 3 * 8 * 2**-4
    assert (found[3] == 0).all()


@pytest.mark.parametrize("width", SCALED)
def test_the_kernels_scale_rows_as_torch_does(
    interpreted: Callable[[str], Callable[..., None]], width: int
) -> None:
    """The interpreter has no 8 bits: into float16 with their range the rows' numbers are equal."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(3, width, generator=chance)
    x[2] = 0
    most = torch.finfo(FLOAT8).max
    for gelu in (False, True):
        expected = Scaled.of(x, gelu=gelu)
        values, scale = torch.empty_like(x, dtype=torch.float16), torch.empty(3)
        with patch.object(torch, "finfo", lambda dtype: _Range(most)):
            interpreted("launch_scale_rows")(x, gelu, values, scale)
        torch.testing.assert_close(scale, expected.scale)
        near = values.float().to(FLOAT8).float()
        assert (near != expected.values.float()).float().mean() < 0.01  # where a tie was rounded

    weight, bias = torch.rand(2, width, generator=chance)
    norm = LayerNorm(weight, bias, torch.float32)
    rows, own = x.clone(), x.clone()
    expected = Scaled.empty_like(x)
    add_norm(rows, x, None, norm, expected.values, expected.scale)
    with patch.object(torch, "finfo", lambda dtype: _Range(most)):
        interpreted("launch_add_norm")(own, x, None, norm.weight, norm.bias, values, scale)
    assert torch.equal(own, rows)
    torch.testing.assert_close(scale, expected.scale)
    near = values.float().to(FLOAT8).float()
    assert (near != expected.values.float()).float().mean() < 0.01


class _Range:
    def __init__(self, most: float) -> None:
        self.max = most


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernels_compile_for_gpus_that_have_eight_bits(
    monkeypatch: pytest.MonkeyPatch, architecture: int, width: int
) -> None:
    def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, out = on_meta(1500, width), on_meta(1500, width, dtype=FLOAT8)
    scale = on_meta(1500, dtype=torch.float32)
    module = load_kernel(monkeypatch, TRITON, interpreted=False)
    launch = module.launch_scale_rows
    built = compiled(launch, "scale_rows", architecture, rows, True, out, scale)
    assert "e4m3" in built["ptx"]
    args = (rows, rows, on_meta(width), on_meta(width), on_meta(width), out, scale)
    built = compiled(module.launch_add_norm, "add_norm", architecture, *args)
    assert "e4m3" in built["ptx"]


def test_what_cannot_is_told_and_what_to_do() -> None:
    check_float8((8, 9), loads_triton=True)
    check_float8((9, 0), loads_triton=True)
    for capability, loads_triton, said in (
        (None, True, "for GPUs"),
        ((8, 0), True, "8.9, this one has 8.0"),
        ((9, 0), False, "Triton"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            check_float8(capability, loads_triton)
    with pytest.raises(ConfigurationError, match="on a CPU take int8"):
        resolve_dtype("float8", "cpu")
    assert resolve_dtype("float8", "cuda") == "bfloat16"


def test_the_setting_is_the_encoders_alone() -> None:
    settings = load_settings(None, {"encoder": {"dtype": "float8"}}, environ={})
    assert settings.encoder.dtype == "float8"
    with pytest.raises(ConfigurationError, match=r"decoder\.dtype"):
        load_settings(None, {"decoder": {"dtype": "float8"}}, environ={})

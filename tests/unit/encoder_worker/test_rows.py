"""In int8 a team gives what torch gives, by whomever rows are taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.common.kernels.cpu.machine_code import as_array
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.layers import MIDDLE, quantize_rows
from encoder_worker.cpu.products import Int8Products, PlainProducts, make_products
from encoder_worker.cpu.rows import Int8Kernels
from encoder_worker.cpu.team import TeamEncoder, team_kernels
from encoder_worker.cpu.team_kernels import TeamKernels
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import encode_by

NATIVE = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with AVX512"
)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NATIVE)], ids=str
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(cached_checkpoint("tiny")))


def make_kernels(dtype: torch.dtype) -> TeamKernels:
    kernels = team_kernels(dtype, int8=True)
    assert kernels is not None
    return kernels


def make_int8(dtype: torch.dtype) -> Int8Kernels:
    int8 = make_kernels(dtype).int8
    assert int8 is not None
    return int8


def make_mel(checkpoint: Checkpoint) -> Tensor:
    pcm = [make_pcm(seconds, seed) for seed, seconds in enumerate((4.0, 30.0))]
    return LogMel(checkpoint.dims.n_mels)(pcm)


def encode(encoder: AudioEncoder, kernels: TeamKernels, n_threads: int, mel: Tensor) -> Tensor:
    team = TeamEncoder(encoder, kernels, n_threads)
    states = encode_by(team, mel, encoder.dims.n_audio_state)
    team.close()
    return states


def off(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


@DTYPES
@torch.inference_mode()
def test_the_teams_states_are_as_exact_as_torchs(
    checkpoint: Checkpoint, dtype: torch.dtype
) -> None:
    """Through all layers each integer that rounds otherwise changes others, so compare errors."""
    encoder, kernels = AudioEncoder(checkpoint, dtype, int8=True), make_kernels(dtype)
    assert isinstance(make_products(encoder, kernels), Int8Products)
    mel = make_mel(checkpoint)[:, :, :640]
    found, by_torch = encode(encoder, kernels, 2, mel), encoder(mel)
    exact = AudioEncoder(checkpoint)(mel)
    error, theirs = off(found, exact), off(by_torch, exact)
    print(f"{error:.4f}, torch's {theirs:.4f}, from each other {off(found, by_torch):.4f}")
    assert 0.005 < error < 1.05 * theirs


@DTYPES
@torch.inference_mode()
def test_a_layers_products_are_torchs_int8(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    encoder, kernels = AudioEncoder(checkpoint, dtype, int8=True), make_kernels(dtype)
    generator = torch.Generator().manual_seed(0)
    n, d = 50, encoder.dims.n_audio_state
    x, attended = (torch.randn(n, d, generator=generator) for _ in range(2))
    attended = attended.to(dtype)
    most = 5e-4 if dtype == torch.float32 else 0.015
    found, expected = x.clone(), x.clone()
    by_kernels = Int8Products(encoder, make_int8(dtype))
    by_torch = PlainProducts(encoder, kernels)
    normed, expected_normed = (
        products.layer(0, stream, attended)
        for products, stream in ((by_kernels, found), (by_torch, expected))
    )
    assert off(found - x, expected - x) < most
    integers, scales = quantize_rows(expected_normed)
    np.testing.assert_allclose(normed.scales, scales.numpy(), rtol=10 * most)
    differ = normed.rows.int() - MIDDLE != integers
    print(f"{differ.float().mean():.4f} of the integers differ")
    assert differ.float().mean() < (0.02 if dtype == torch.float32 else 0.5)
    states, expected_states = (
        products.last_layer(x.clone(), attended) for products in (by_kernels, by_torch)
    )
    assert off(states, expected_states.float()) < most


@pytest.mark.parametrize("n_positions", [320, 1500])
@DTYPES
@torch.inference_mode()
def test_a_windows_states_do_not_depend_on_company(
    checkpoint: Checkpoint, dtype: torch.dtype, n_positions: int
) -> None:
    encoder, mel, kernels = (
        AudioEncoder(checkpoint, dtype, int8=True),
        make_mel(checkpoint)[:, :, : 2 * n_positions],
        make_kernels(dtype),
    )
    together = encode(encoder, kernels, 2, mel)
    for i in range(len(mel)):
        assert torch.equal(encode(encoder, kernels, 1, mel[i : i + 1])[0], together[i])


@DTYPES
def test_rows_are_quantised_as_by_torch(dtype: torch.dtype) -> None:
    x = torch.randn(5, 70, generator=torch.Generator().manual_seed(0)) * 3
    x[1], x[2], x[3, 7] = 0.0, x[2] * 1e6, torch.nan
    x = x.to(dtype)
    rows, scales = np.empty((5, 70), np.uint8), np.empty(5, np.float32)
    make_int8(dtype).quantize(as_array(x), rows, scales)
    expected, expected_scales = quantize_rows(x)
    numbers = [0, 1, 2, 4]
    np.testing.assert_array_equal(scales, expected_scales.numpy())
    found = rows.astype(int) - MIDDLE
    np.testing.assert_array_equal(found[numbers], expected.numpy()[numbers])
    assert np.isnan(scales[3]), "a window that the model cannot compute must not look well"

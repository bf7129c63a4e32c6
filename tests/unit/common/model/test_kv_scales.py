"""KV of 8 bits: whatever is heard fits, and a scale changes nothing but that."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.cross_kv import CrossKVProjection
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.dims import encoder_shapes
from cluster.common.model.kv_scales import KVScales, kv_scales
from cluster.common.model.layers import LayerNorm
from cluster.common.model.weights import load_tensors
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.backends import load_decoders, torch_attention
from tests.support.checkpoints import cached_checkpoint

FLOAT8, MOST = torch.float8_e4m3fn, 448.0
N_TOKENS, N_FRAMES = 6, 1500


def scales_of(checkpoint: Checkpoint) -> KVScales:
    scales = kv_scales(checkpoint, FLOAT8)
    assert scales is not None
    return scales


@pytest.fixture
def loud(tmp_path: Path) -> Checkpoint:
    """The same function with K of one head 4096 times as large, V of one layer 1024 times."""
    folder = tmp_path / "loud"
    shutil.copytree(cached_checkpoint(), folder)
    tensors = load_file(folder / "model.safetensors")
    prefix = "model.decoder.layers.1.encoder_attn"
    half = slice(0, tensors[f"{prefix}.k_proj.weight"].shape[0] // 2)  # the first of two heads
    tensors[f"{prefix}.k_proj.weight"][half] *= 4096
    for name in ("q_proj.weight", "q_proj.bias"):
        tensors[f"{prefix}.{name}"][half] /= 4096
    for name in ("v_proj.weight", "v_proj.bias"):
        tensors[f"{prefix}.{name}"] *= 1024
    tensors[f"{prefix}.out_proj.weight"] /= 1024
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return open_checkpoint(str(folder))


def heard(checkpoint: Checkpoint, rows: torch.Tensor) -> torch.Tensor:
    """What the encoder's last norm makes of any rows [n, n_audio_state]."""
    shapes = encoder_shapes(checkpoint.dims)
    names = ("encoder.layer_norm.weight", "encoder.layer_norm.bias")
    tensors = load_tensors(checkpoint, {name: shapes[name] for name in names})
    return LayerNorm.load(tensors, "encoder.layer_norm")(rows)


def logits(checkpoint: Checkpoint, dtype: torch.dtype, scales: KVScales | None) -> torch.Tensor:
    """Of a few tokens over one window, whose KV lies in a pool of that dtype."""
    dims, layout = checkpoint.dims, kv_layout(checkpoint, N_FRAMES)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(N_FRAMES, dims.n_audio_state, generator=generator)
    pool = torch.zeros(1, *layout.page_shape, dtype=dtype)
    own = torch.zeros(1, dims.n_text_layer, 2, 16, dims.n_text_head, dims.text_head_dim)
    CrossKVProjection(checkpoint, scales=scales).write(heard(checkpoint, rows)[None], pool, [(0,)])
    decoder = load_decoders(checkpoint, torch_attention(own, pool), own, pool).torch
    decoder.plan(
        AttentionBatch(
            PagedKV.make([N_TOKENS], [(0,)], [N_TOKENS], 16),
            PagedKV.make([N_TOKENS], [(0,)], [N_FRAMES], N_FRAMES),
        )
    )
    with torch.inference_mode():
        tokens = torch.arange(100, 100 + N_TOKENS)
        return decoder.logits(decoder.states(tokens, torch.arange(N_TOKENS)))


def test_scales_are_powers_of_two_and_none_are_for_wider_pools(loud: Checkpoint) -> None:
    scales = scales_of(loud)
    for scale in (scales.keys, scales.values):
        assert torch.equal(scale.log2(), scale.log2().round())
    assert scales.keys[1, 0] / scales.keys[1, 1] >= 1024
    assert kv_scales(loud, torch.bfloat16) is None


@torch.inference_mode()
def test_no_audio_can_saturate_what_is_stored(loud: Checkpoint) -> None:
    """Not even rows made to be as loud as possible for each output in turn; nor is room wasted."""
    scales = scales_of(loud)
    plain, stored = (CrossKVProjection(loud, scales=one) for one in (None, scales))
    n = loud.dims.n_audio_state
    shapes = encoder_shapes(loud.dims)
    gamma = load_tensors(loud, {"encoder.layer_norm.weight": shapes["encoder.layer_norm.weight"]})
    rows = [1e4 * torch.randn(500, n, generator=torch.Generator().manual_seed(0))]
    for layer in range(loud.dims.n_text_layer):
        for name in ("k_proj", "v_proj"):
            key = f"decoder.layers.{layer}.encoder_attn.{name}.weight"
            weight = load_tensors(loud, {key: (loud.dims.n_text_state, n)})[key]
            loudest = weight * gamma["encoder.layer_norm.weight"]
            rows += [1e4 * loudest, -1e4 * loudest]
    states = heard(loud, torch.cat(rows))[None]
    wide, kv = plain.project(states), stored.project(states)
    assert kv.abs().max() <= MOST
    assert wide.abs().max() > 20 * MOST
    factors = torch.stack((scales.keys, scales.values[:, None].expand_as(scales.keys)), 1)
    assert torch.equal(kv * factors[..., None], wide), "no bit of it is another one"
    by_head = kv.abs().amax((0, 1, 5))  # [L, 2, H]
    assert (by_head[:, 0] > MOST / 8).all()


def test_a_loud_checkpoint_is_as_good_in_8_bits_as_a_quiet_one(loud: Checkpoint) -> None:
    """Without scales its KV saturates, and its logits are another text's."""
    quiet = open_checkpoint(str(cached_checkpoint()))
    errors = {}
    for name, checkpoint in (("quiet", quiet), ("loud", loud)):
        exact = logits(checkpoint, torch.float32, None)
        found = logits(checkpoint, FLOAT8, scales_of(checkpoint))
        errors[name] = ((found - exact).square().mean() / exact.var()).sqrt().item()
    assert errors["quiet"] < 0.05, errors
    assert math.isclose(errors["loud"], errors["quiet"], rel_tol=0.2), errors
    clipped = CrossKVProjection(loud)
    states = heard(loud, torch.randn(50, loud.dims.n_audio_state))[None]
    with torch.inference_mode():
        assert (clipped.project(states).abs() > MOST).float().mean() > 0.1

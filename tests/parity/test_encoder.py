"""Encoder states and cross K/V equal Hugging Face's for every shape family, in float32."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from cluster.common.kv.cross_kv import CrossKVProjection
from cluster.common.model.checkpoint import open_checkpoint
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import cached_checkpoint, make_checkpoint
from tests.support.references.hugging_face import (
    FAMILIES,
    assert_close,
    cross_kv,
    hf_features,
    hf_model,
    make_pcm,
)


@pytest.mark.parametrize("shape", FAMILIES)
@torch.inference_mode()
def test_states_and_cross_kv_equal_the_reference(shape: str) -> None:
    folder = cached_checkpoint(shape)
    checkpoint = open_checkpoint(str(folder))
    mel = hf_features(folder, [make_pcm(5.0)])
    states = AudioEncoder(checkpoint)(mel)
    model = hf_model(folder)
    expected = model.model.encoder(mel).last_hidden_state
    assert_close(f"{shape} encoder", states, expected)
    kv = CrossKVProjection(checkpoint).project(states)
    expected_kv = cross_kv(model, expected)[None]
    assert_close(f"{shape} cross K", kv[:, :, :, 0], expected_kv[:, :, :, 0])
    assert_close(f"{shape} cross V", kv[:, :, :, 1], expected_kv[:, :, :, 1])


@pytest.mark.parametrize("n_positions", [128, 320])
@torch.inference_mode()
def test_a_trimmed_context_equals_the_reference_on_the_same_shortened_mel(n_positions: int) -> None:
    """The reference with its positions cut to as many, and features of as many frames."""
    folder = cached_checkpoint("tiny")
    checkpoint = open_checkpoint(str(folder))
    mel = hf_features(folder, [make_pcm(2.5), make_pcm(1.0, 1)])[:, :, : 2 * n_positions]
    states = AudioEncoder(checkpoint)(mel)
    encoder = copy.deepcopy(hf_model(folder).model.encoder)
    encoder.config.max_source_positions = encoder.max_source_positions = n_positions
    encoder.embed_positions = torch.nn.Embedding.from_pretrained(
        encoder.embed_positions.weight[:n_positions]
    )
    expected = encoder(mel).last_hidden_state
    assert states.shape[1] == n_positions
    assert_close(f"{n_positions} positions", states, expected)


@torch.inference_mode()
def test_bfloat16_stays_near_float32() -> None:
    folder = cached_checkpoint("tiny")
    checkpoint = open_checkpoint(str(folder))
    mel = hf_features(folder, [make_pcm(5.0)])
    states = AudioEncoder(checkpoint, torch.bfloat16)(mel)
    assert states.dtype == torch.bfloat16
    assert_close("bfloat16", states, AudioEncoder(checkpoint)(mel), share=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "layers"), [("tiny", 4), ("base", 6), ("small", 12)])
@torch.inference_mode()
def test_the_published_depth_equals_the_reference(tmp_path: Path, shape: str, layers: int) -> None:
    """Rounding must not grow over the layers."""
    folder = make_checkpoint(tmp_path, shape, encoder_layers=layers)
    mel = hf_features(folder, [make_pcm(12.0)])
    states = AudioEncoder(open_checkpoint(str(folder)))(mel)
    expected = hf_model(folder).model.encoder(mel).last_hidden_state
    assert_close(f"{shape}, {layers} layers", states, expected)

"""The GPU's encoder of few kernels, by their plain twins, gives what the plain encoder gives."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.layers import as_it_is
from encoder_worker.gpu.encoder import GpuEncoder
from encoder_worker.model import AudioEncoder
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import assert_close

SHAPES = ["micro", "tiny", pytest.param("large-v3", marks=pytest.mark.slow)]
FRAMES = 120  # of mel: a short context


def make_encoder(checkpoint: Checkpoint) -> AudioEncoder:
    """With products as a GPU has them."""
    with patch("encoder_worker.model.packer", lambda *args, **flags: as_it_is):
        return AudioEncoder(checkpoint, torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_the_layers_equal_the_plain_ones(shape: str) -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint(shape)))
    mel = torch.randn(3, checkpoint.dims.n_mels, FRAMES, generator=torch.Generator().manual_seed(1))
    expected = make_encoder(checkpoint)(mel)
    made = GpuEncoder(make_encoder(checkpoint))
    assert made.dims == checkpoint.dims
    assert_close("states", made(mel), expected, share=2e-5)

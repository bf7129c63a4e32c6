"""Rows stored in 8 bits by the encoder's kernel are what torch stores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.common.kernels.gpu.operators import stored_as
from cluster.common.model.checkpoint import open_checkpoint
from encoder_worker.cpu.rows import N_BFLOAT16, store_float8
from encoder_worker.forward import WindowEncoder
from tests.support.checkpoints import cached_checkpoint
from tests.support.references.hugging_face import make_pcm

BUILD_S = 100.0


def test_every_bfloat16_becomes_what_torch_makes_of_it() -> None:
    bits = np.random.default_rng(2).permutation(N_BFLOAT16).astype(np.uint16).reshape(256, -1)
    rows = torch.from_numpy(bits).view(torch.bfloat16)
    page = torch.zeros(2, 300, bits.shape[1]).to(torch.float8_e4m3fn)
    store_float8(rows, page[1, 7 : 7 + len(rows)])
    stored = page.view(torch.uint8)
    expected = stored_as(rows, torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(stored[1, 7 : 7 + len(rows)], expected)
    assert not stored[0].any()
    assert not stored[1, :7].any()
    assert not stored[1, 7 + len(rows) :].any()


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU with AVX512"
)
def test_a_window_s_pages_get_what_its_pages_of_16_bits_become() -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint("tiny")))
    dims = checkpoint.dims
    shape = (1, dims.n_text_layer, 2, dims.n_audio_ctx, dims.n_text_head, dims.text_head_dim)

    def encoded(dtype: torch.dtype) -> Tensor:
        encoder = WindowEncoder(checkpoint, "bfloat16", "cpu")  # scales of 1, for both
        assert encoder._kernels is not None
        assert encoder._kernels.wait(BUILD_S)
        pool = torch.zeros(shape).to(dtype)
        encoder([make_pcm(2.0, 1)], pool, [[0]], context=192)()
        encoder.close()
        return pool

    wide, narrow = encoded(torch.bfloat16), encoded(torch.float8_e4m3fn)
    n = wide.numel() * 192 // dims.n_audio_ctx  # a short window lies packed in the beginning
    expected = stored_as(wide.flatten()[:n], torch.float8_e4m3fn)
    assert wide.flatten()[:n].any()
    assert torch.equal(narrow.flatten()[:n].view(torch.uint8), expected.view(torch.uint8))

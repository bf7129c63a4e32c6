"""A page per window on a GPU: the product writes it, and nothing is scattered."""

from __future__ import annotations

import pytest
import torch

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.cross_kv import CrossKVProjection, cross_kv_parts
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.layers import Linear
from encoder_worker.gpu import static_encoder
from encoder_worker.gpu.static_encoder import StaticEncoder, WholeWindows
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from tests.support.references.hugging_face import assert_close, make_pcm

UNTOUCHED = -7.0
WINDOWS = [make_pcm(seconds, seed) for seed, seconds in enumerate((0.5, 4.0, 29.9, 30.0))]


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 2e-5), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("context", [1500, 320])
def test_the_same_kv_lies_in_the_same_places(
    checkpoint: Checkpoint,
    context: int,
    dtype: torch.dtype,
    share: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As scattered; other pages, and frames behind a shorter context, stay as they were."""
    layout = kv_layout(checkpoint, 1500)
    mel, encoder = LogMel(checkpoint.dims.n_mels), AudioEncoder(checkpoint, dtype)
    scattered, written = (torch.zeros(5, *layout.page_shape, dtype=dtype) for _ in range(2))
    fused = Linear.fused(cross_kv_parts(checkpoint, dtype, "cpu"))
    projections = CrossKVProjection(checkpoint, dtype), WholeWindows(fused, written, 4)
    for pool, projection in zip((scattered, written), projections, strict=True):
        if isinstance(projection, WholeWindows):
            monkeypatch.setattr(static_encoder, "scatter_pages", None)
        static = StaticEncoder(mel, encoder, projection, pool, max_batch=4, contexts=(320,))
        static(WINDOWS, [[4], [1], [0], [3]])()  # leaves states behind
        pool.fill_(UNTOUCHED)
        static(WINDOWS[:3], [[4], [0], [2]], context=context)()
    assert_close("KV", written.float(), scattered.float(), share=share)
    assert (written[[1, 3]] == UNTOUCHED).all()
    assert (written[:, :, :, context:] == UNTOUCHED).all()
    assert not (written[[4, 0, 2], :, :, :context] == UNTOUCHED).any()

"""The engine publishes what its exporter is for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from cluster.common.errors import ConfigurationError
from cluster.common.kv.connect import states_layout
from cluster.common.messages import CrossKVHandle, EncodeRequest
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.settings import EncoderSettings
from encoder_worker.engine import EncoderEngine
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from tests.support.kv.ends import MemoryExporter
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S

PCM = make_pcm(0.5)
KEY = b"k" * 32


class Handoff:
    """An engine with an exporter of encoder states."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        layout = states_layout(checkpoint)
        self.exporter = MemoryExporter(layout, 2, cluster_key=KEY, lease_s=60.0)
        settings = EncoderSettings(device="cpu", dtype="float32", threads=1)
        self.engine = EncoderEngine(checkpoint, self.exporter, settings)

    def encode(self) -> CrossKVHandle:
        return self.engine.submit(EncodeRequest("r", 0, 0, PCM, 60.0)).result(PATIENCE_S).handle

    def page(self, handle: CrossKVHandle) -> torch.Tensor:
        pool = self.exporter.pool
        return pool.tensor[pool.page_at(handle.addresses[0])]


@contextmanager
def make(checkpoint: Checkpoint) -> Iterator[Handoff]:
    made = Handoff(checkpoint)
    try:
        yield made
        assert made.engine.drain(PATIENCE_S)
    finally:
        made.engine.close()
        made.exporter.close()
        made.exporter.pool.check_integrity()


def test_states_are_published_as_the_encoder_gave_them(checkpoint: Checkpoint) -> None:
    with make(checkpoint) as made:
        handle = made.encode()
        with torch.inference_mode():
            expected = AudioEncoder(checkpoint)(LogMel(checkpoint.dims.n_mels)([PCM]))[0]
        largest = (made.page(handle) - expected).abs().max().item()
        assert largest < 1e-5, f"differs by {largest}"
        assert (handle.payload, handle.frames) == ("encoder_states", 1500)
        assert made.engine.stats().leases == 1
        assert made.engine.revoke(handle)


def test_a_layout_of_another_checkpoint_is_refused(checkpoint: Checkpoint) -> None:
    wrong = MemoryExporter(replace(states_layout(checkpoint), model="other"), 1, cluster_key=KEY)
    with pytest.raises(ConfigurationError, match="encoder_states"):
        EncoderEngine(checkpoint, wrong, EncoderSettings(device="cpu", threads=1))
    wrong.close()

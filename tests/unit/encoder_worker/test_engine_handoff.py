"""The engine publishes what its exporters are for; with both, what the link's READs say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from cluster.errors import ConfigurationError
from cluster.kv.layout import window_bytes
from cluster.kv.layout_for import kv_layout, states_layout
from cluster.kv.notifications import read_message
from cluster.messages import CrossKVHandle, EncodeRequest
from cluster.model.checkpoint import Checkpoint
from cluster.settings import EncoderSettings
from encoder_worker.engine import EncoderEngine
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from encoder_worker.payload_choice import N_READS
from tests.support.kv.ends import MemoryExporter
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S

PCM = make_pcm(0.5)
KEY = b"k" * 32


class Handoff:
    """An engine with an exporter of each payload given."""

    def __init__(self, checkpoint: Checkpoint, payloads: tuple[str, ...]) -> None:
        layouts = {"cross_kv": kv_layout(checkpoint), "encoder_states": states_layout(checkpoint)}
        self.exporters = {
            payload: MemoryExporter(layouts[payload], 2, cluster_key=KEY, lease_s=60.0)
            for payload in payloads
        }
        settings = EncoderSettings(device="cpu", dtype="float32", threads=1)
        first, *others = self.exporters.values()
        self.engine = EncoderEngine(checkpoint, first, settings, None, *others)

    def encode(self) -> CrossKVHandle:
        return self.engine.submit(EncodeRequest("r", 0, 0, PCM, 60.0)).result(PATIENCE_S).handle

    def read(self, bytes_per_s: float, n: int = 1, projection_s: float = 0.0) -> list[str]:
        """`n` windows, each encoded and read over a link of that speed; their payloads."""
        payloads = []
        for _ in range(n):
            handle = self.encode()
            exporter = self.exporters[handle.payload]
            read_s = window_bytes(exporter.layout) / bytes_per_s
            exporter.handle_notifications([read_message(handle.lease, read_s, projection_s)])
            payloads.append(handle.payload)
        return payloads

    def page(self, handle: CrossKVHandle) -> torch.Tensor:
        pool = self.exporters[handle.payload].pool
        return pool.tensor[pool.page_at(handle.addresses[0])]


@contextmanager
def make(checkpoint: Checkpoint, *payloads: str) -> Iterator[Handoff]:
    made = Handoff(checkpoint, payloads)
    try:
        yield made
        assert made.engine.drain(PATIENCE_S)
    finally:
        made.engine.close()
        for exporter in made.exporters.values():
            exporter.close()
            exporter.pool.check_integrity()


def test_states_are_published_as_the_encoder_gave_them(checkpoint: Checkpoint) -> None:
    with make(checkpoint, "encoder_states") as made:
        handle = made.encode()
        with torch.inference_mode():
            expected = AudioEncoder(checkpoint)(LogMel(checkpoint.dims.n_mels)([PCM]))[0]
        largest = (made.page(handle) - expected).abs().max().item()
        assert largest < 1e-5, f"differs by {largest}"
        assert (handle.payload, handle.frames) == ("encoder_states", 1500)
        assert made.engine.stats().leases == 1
        assert made.engine.revoke(handle)


def test_with_both_the_link_decides_and_may_change_its_mind(checkpoint: Checkpoint) -> None:
    with make(checkpoint, "cross_kv", "encoder_states") as made:
        assert (made.engine.stats().pages_total, made.engine.stats().pages_free) == (4, 4)
        slow, fast, quick = 1e5, 1e12, 1e-6  # bytes/s, bytes/s, seconds of a projection
        assert made.read(slow, N_READS, quick) == ["cross_kv"] * N_READS
        assert made.engine.stats().sends_states
        assert made.read(slow, 2, quick) == ["encoder_states"] * 2
        assert made.read(fast, N_READS - 2, 0.5)[-1] == "encoder_states"
        assert made.read(fast, 1, 0.5) == ["cross_kv"]
        assert not made.engine.stats().sends_states


def test_leases_of_both_kinds_can_be_revoked_and_are_waited_for(checkpoint: Checkpoint) -> None:
    with make(checkpoint, "cross_kv", "encoder_states") as made:
        made.read(1e5, N_READS, 1e-6)
        states = made.encode()
        assert states.payload == "encoder_states"
        assert made.engine.stats().leases == 1
        assert not made.engine.drain(0.05)
        assert made.engine.revoke(states)
        assert not made.engine.revoke(states)


def test_a_layout_of_another_checkpoint_is_refused(checkpoint: Checkpoint) -> None:
    wrong = MemoryExporter(replace(states_layout(checkpoint), model="other"), 1, cluster_key=KEY)
    with pytest.raises(ConfigurationError, match="encoder_states"):
        EncoderEngine(checkpoint, wrong, EncoderSettings(device="cpu", threads=1))
    wrong.close()

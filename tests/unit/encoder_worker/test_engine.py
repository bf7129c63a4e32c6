"""The encoder engine: right KV, full batches, and every page accounted for."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.common.errors import DeadlineExceededError
from cluster.common.kv.connect import states_layout
from cluster.common.messages import FileMel
from cluster.common.metrics import ENCODER_METRICS, MetricSpec, Recorder
from cluster.common.model.checkpoint import Checkpoint
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from tests.support.kv.ends import wait_until
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S, MakeBench


@pytest.mark.parametrize("page_frames", [0, 125])
def test_each_window_s_kv_is_in_the_pages_of_its_handle(bench: MakeBench, page_frames: int) -> None:
    b = bench(n_windows=6, page_frames=page_frames)
    windows = [make_pcm(0.3 + 0.9 * n, seed=n) for n in range(6)]
    futures = [b.submit(pcm, f"r{n}") for n, pcm in enumerate(windows)]
    for n, (pcm, future) in enumerate(zip(windows, futures, strict=True)):
        reply = future.result(PATIENCE_S)
        handle = reply.handle
        assert (handle.request_id, handle.window, handle.frames) == (f"r{n}", 0, 1500)
        assert handle.layout_hash == b.exporter.layout.hash
        largest = (b.kv(handle) - b.expected_kv(pcm)).abs().max().item()
        assert largest < 1e-5, f"window {n} differs by {largest}"
        assert reply.timings.queue_s >= 0
        assert reply.timings.encode_s > 0
        assert b.engine.revoke(handle)
    b.exporter.pool.check_integrity()


@pytest.mark.parametrize("page_frames", [0, 125])
def test_a_trimmed_window_fills_as_much_as_its_context(bench: MakeBench, page_frames: int) -> None:
    b = bench(n_windows=6, page_frames=page_frames)
    contexts = (320, 0, 192, 320, 192)
    windows = [make_pcm(0.3 + 0.6 * n, seed=n) for n in range(5)]
    alone = []
    for pcm, context in zip(windows, contexts, strict=True):
        handle = b.submit(pcm, context=context).result(PATIENCE_S).handle
        share = len(handle.addresses) / b.exporter.layout.pages_per_window
        assert b.engine.stats().signals(0.0).unread == pytest.approx(share / 6)
        alone.append(b.kv(handle).clone())
        b.engine.revoke(handle)
    held = b.hold()
    futures = [
        b.submit(pcm, f"r{n}", context=context)
        for n, (pcm, context) in enumerate(zip(windows, contexts, strict=True))
    ]
    assert b.engine.stats().load.work == pytest.approx(1 + (320 + 1500 + 192 + 320 + 192) / 1500)
    stats = b.engine.stats()
    assert b.engine.load() == stats.load
    waiting_s = stats.load.window_s * (320 + 1500 + 192 + 320 + 192) / 1500
    assert stats.signals(0.0).queue_s == pytest.approx(waiting_s), "what a scaler goes by"
    b.gate.set()
    for n, (pcm, future) in enumerate(zip(windows, futures, strict=True)):
        handle, n_positions = future.result(PATIENCE_S).handle, contexts[n] or 1500
        assert handle.frames == n_positions
        assert len(handle.addresses) == b.exporter.layout.pages_for(n_positions)
        expected = b.expected_kv(pcm, context=n_positions)
        largest = (b.kv(handle) - expected).abs().max().item()
        assert largest < 1e-5, f"window {n} differs by {largest}"
        assert torch.equal(b.kv(handle), alone[n]), "its neighbours changed it"
        b.engine.revoke(handle)
    assert b.batch_sizes[5:] == [1, 2, 1, 2]
    b.engine.revoke(held.result(PATIENCE_S).handle)
    wait_until(lambda: b.engine.stats().running == 0)
    assert b.engine.stats().load.work == 0
    assert b.engine.load() == b.engine.stats().load
    b.exporter.pool.check_integrity()


def test_states_are_published_as_the_encoder_gave_them(
    bench: MakeBench, checkpoint: Checkpoint
) -> None:
    b, pcm = bench(layout=states_layout(checkpoint)), make_pcm(0.5)
    handle, pool = b.submit(pcm).result(PATIENCE_S).handle, b.exporter.pool
    with torch.inference_mode():
        expected = AudioEncoder(checkpoint)(LogMel(checkpoint.dims.n_mels)([pcm]))[0]
    largest = (pool.tensor[pool.page_at(handle.addresses[0])] - expected).abs().max().item()
    assert largest < 1e-5, f"differs by {largest}"
    assert (handle.payload, handle.frames) == ("encoder_states", 1500)
    assert b.engine.revoke(handle)
    assert not b.engine.revoke(handle)
    pool.check_integrity()


def test_a_slice_of_a_file_shares_a_batch_with_windows(bench: MakeBench) -> None:
    b = bench(n_windows=4)
    held = b.hold()
    pcm, file_mel = make_pcm(2.0, seed=1), FileMel(n_before=320, n_frames=197, log_max=1.5)
    sliced = b.submit(pcm, "sliced", file_mel=file_mel)
    plain = b.submit(pcm, "plain")
    b.gate.set()
    replies = [future.result(PATIENCE_S) for future in (held, sliced, plain)]
    assert [reply.timings.batch_size for reply in replies] == [1, 2, 2]
    assert (b.kv(replies[1].handle) - b.expected_kv(pcm, file_mel)).abs().max() < 1e-5
    assert (b.kv(replies[2].handle) - b.expected_kv(pcm)).abs().max() < 1e-5


def test_windows_that_wait_together_are_one_batch(bench: MakeBench) -> None:
    b = bench(n_windows=8, max_batch=3)
    first = b.hold()
    rest = [b.submit(make_pcm(0.2), f"r{n}") for n in range(5)]
    assert b.engine.stats().queued == 5
    assert b.engine.stats().queued_audio_s == pytest.approx(1.0)
    b.gate.set()
    sizes = [future.result(PATIENCE_S).timings.batch_size for future in (first, *rest)]
    assert sizes == [1, 3, 3, 3, 2, 2]
    wait_until(lambda: b.engine.stats().running == 0)
    stats = b.engine.stats()
    assert (stats.batches, stats.windows, stats.failed) == (3, 6, 0)
    assert (stats.leases, stats.pages_free, stats.pages_total) == (6, 2, 8)


def test_a_window_that_finds_no_room_in_time_fails(bench: MakeBench) -> None:
    b = bench(n_windows=1)
    holder = b.submit(make_pcm(0.1)).result(PATIENCE_S)
    late = b.submit(make_pcm(0.1), remaining_s=0.1)
    patient = b.submit(make_pcm(0.1))
    with pytest.raises(DeadlineExceededError):
        late.result(PATIENCE_S)
    assert (b.engine.stats().expired, b.engine.stats().queued) == (1, 1)
    b.engine.revoke(holder.handle)
    b.engine.revoke(patient.result(PATIENCE_S).handle)
    b.exporter.pool.check_integrity()


def test_metrics_are_recorded_by_their_names(bench: MakeBench) -> None:
    seen = defaultdict[str, list[float]](list)

    def metric(spec: MetricSpec) -> Any:
        return SimpleNamespace(observe=lambda value, **_: seen[spec.name].append(value))

    b = bench(recorder=Recorder(ENCODER_METRICS, metric))
    b.submit(make_pcm(0.1)).result(PATIENCE_S)
    wait_until(lambda: "splitscribe_encoder_batch_windows" in seen)
    assert seen.keys() <= {spec.name for spec in ENCODER_METRICS}
    assert seen["splitscribe_encode_seconds"][0] > 0
    assert seen["splitscribe_encoder_batch_windows"] == [1]

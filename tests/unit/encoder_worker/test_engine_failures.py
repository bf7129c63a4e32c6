"""Failures of the encoder engine stay with their window; nothing hangs, no page is lost."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import (
    InvalidAudioError,
    SequenceFailedError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.common.messages import CrossKVHandle, FileMel
from tests.support.kv.ends import wait_until
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S, MakeBench


def test_one_bad_window_fails_alone(bench: MakeBench) -> None:
    b = bench(n_windows=8)
    held = b.hold()
    b.poison = 777
    windows = [make_pcm(0.2, seed=1), make_pcm(1.0)[:777], make_pcm(0.4, seed=2)]
    good_before, bad, good_after = (b.submit(pcm, f"r{n}") for n, pcm in enumerate(windows))
    b.gate.set()
    with pytest.raises(SequenceFailedError, match="this one cannot be"):
        bad.result(PATIENCE_S)
    for future, pcm in ((good_before, windows[0]), (good_after, windows[2])):
        handle = future.result(PATIENCE_S).handle
        assert (b.kv(handle) - b.expected_kv(pcm)).abs().max() < 1e-5
        b.engine.revoke(handle)
    b.engine.revoke(held.result(PATIENCE_S).handle)
    assert b.batch_sizes == [1, 3, 1, 1, 1]
    assert b.engine.healthy() is None
    assert b.engine.drain(PATIENCE_S)
    b.exporter.pool.check_integrity()


def test_a_window_that_cannot_be_published_fails_alone(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    publish = b.exporter.publish

    def refuse_bad(*args: Any, **options: Any) -> CrossKVHandle:
        if options["request_id"] == "bad":
            raise ValueError("no")
        return publish(*args, **options)

    monkeypatch.setattr(b.exporter, "publish", refuse_bad)
    bad, good = b.submit(make_pcm(0.1), "bad"), b.submit(make_pcm(0.1), "good")
    with pytest.raises(SequenceFailedError, match="no"):
        bad.result(PATIENCE_S)
    b.engine.revoke(good.result(PATIENCE_S).handle)
    assert b.engine.drain(PATIENCE_S)
    b.exporter.pool.check_integrity()


def test_samples_that_are_no_window_are_refused(bench: MakeBench) -> None:
    b, second = bench(), np.zeros(16_000, np.int16)
    for pcm, file_mel, context in (
        (np.zeros(0, np.int16), None, 0),
        (np.zeros(480_001, np.int16), None, 0),
        (np.zeros(100, np.float32), None, 0),
        (np.zeros((2, 100), np.int16), None, 0),
        (second, None, -1),
        (second, None, 1501),
        (second, None, 49),
        (second, FileMel(100, 99, 0.0), 0),
        (second, FileMel(480, 97, 0.0), 0),
        (second, FileMel(-160, 100, 0.0), 0),
        (second, FileMel(0, 0, 0.0), 0),
        (np.zeros(480_000, np.int16), FileMel(0, 3001, 0.0), 0),
        (second, FileMel(0, 100, float("nan")), 0),
        (np.zeros(320, np.int16), FileMel(320, 1, 0.0), 0),
        (second, FileMel(0, 97, 0.0), 0),
    ):
        with pytest.raises(InvalidAudioError, match=f"does not fit .* context of {context}"):
            b.submit(pcm, file_mel=file_mel, context=context)


def test_drain_finishes_what_is_queued_and_waits_for_the_leases(bench: MakeBench) -> None:
    b = bench()
    futures = [b.hold(), b.submit(make_pcm(0.1), "queued")]
    assert not b.engine.drain(0.0)
    with pytest.raises(WorkerDrainingError):
        b.submit(make_pcm(0.1))
    b.gate.set()
    handles = [future.result(PATIENCE_S).handle for future in futures]
    assert not b.engine.drain(0.05)
    for handle in handles:
        b.engine.revoke(handle)
    assert b.engine.drain(PATIENCE_S)


def test_close_fails_what_is_queued_and_stops_the_thread(bench: MakeBench) -> None:
    b = bench()
    held = b.hold()
    queued = b.submit(make_pcm(0.1), "queued")
    closer = threading.Thread(target=b.engine.close)
    closer.start()
    wait_until(lambda: b.engine._closing)
    b.gate.set()
    closer.join(PATIENCE_S)
    assert held.result(PATIENCE_S)
    with pytest.raises(WorkerDrainingError):
        queued.result(PATIENCE_S)
    with pytest.raises(WorkerDrainingError):
        b.submit(make_pcm(0.1))
    b.engine.close()


def test_a_death_in_the_middle_of_a_batch_fails_its_windows_too(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()

    def fail(*args: Any) -> None:
        raise OSError("no more counting")

    monkeypatch.setattr(b.engine._publisher.recorder, "observe", fail)
    futures = [b.hold(), b.submit(make_pcm(0.1), "queued")]
    b.gate.set()
    for future in futures:
        with pytest.raises(WorkerError, match="no more counting"):
            future.result(PATIENCE_S)
    assert "no more counting" in (b.engine.healthy() or "")
    with pytest.raises(WorkerDrainingError, match="thread died"):
        b.submit(make_pcm(0.1))
    assert not b.engine.drain(PATIENCE_S)  # at once


def test_a_window_that_comes_as_the_thread_dies_is_failed_too(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    held = b.hold()
    monkeypatch.setattr(
        b.engine, "_will_queue", lambda _: monkeypatch.setattr(b.engine, "_failure", "it died")
    )
    late = b.submit(make_pcm(0.1), "late")
    assert late.done()
    with pytest.raises(WorkerDrainingError, match="it died"):
        late.result(0)
    b.gate.set()
    b.engine.revoke(held.result(PATIENCE_S).handle)

"""An engine whose device works by itself: what is launched when, and what a lost device means."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from cluster.common.errors import DeadlineExceededError, WorkerDiedError, WorkerDrainingError
from encoder_worker.engine import SLOWEST_WINDOW_S, STUCK_S
from encoder_worker.gpu.static_encoder import Wait
from tests.support.kv.ends import wait_until
from tests.support.references.hugging_face import make_pcm
from tests.support.workers.encoder_engines import PATIENCE_S, Bench, MakeBench, Replaced


class Device:
    """Batches are launched at once and done when `complete` is called."""

    def __init__(self, bench: Bench, lane: int = 0) -> None:
        loop = bench.engine._loops[lane]
        self._forward = loop.forward
        self._free = threading.Semaphore(0)
        self.events: list[tuple[str, int]] = []
        loop.forward = Replaced(self.launch, is_async=True)  # type: ignore[assignment]

    def complete(self, n: int = 1) -> None:
        self._free.release(n)

    def launch(self, windows: Any, *args: Any) -> Wait:
        n = len(windows)
        self.events.append(("launched", n))
        ready = self._forward(windows, *args)

        def wait() -> None:
            assert self._free.acquire(timeout=PATIENCE_S)
            ready()
            self.events.append(("done", n))

        return wait


def test_a_full_batch_is_launched_before_the_last_one_is_done(bench: MakeBench) -> None:
    b = bench(n_windows=8, max_batch=2)
    device = Device(b)
    first = b.hold("first")
    rest = [b.submit(make_pcm(0.1), f"r{n}") for n in range(5)]
    b.gate.set()
    wait_until(lambda: len(device.events) == 2)
    assert device.events == [("launched", 1), ("launched", 2)]
    assert b.engine.stats().running == 3
    device.complete()
    wait_until(lambda: len(device.events) == 4)
    assert device.events[2:] == [("done", 1), ("launched", 2)]
    device.complete(3)
    sizes = [future.result(PATIENCE_S).timings.batch_size for future in (first, *rest)]
    assert sizes == [1, 2, 2, 2, 2, 1]
    # The last window is no full batch, so it waited for what was under way.
    assert device.events[4:] == [("done", 2), ("done", 2), ("launched", 1), ("done", 1)]
    wait_until(lambda: b.engine.stats().running == 0)
    assert b.engine.stats().windows == 6
    b.exporter.pool.check_integrity(6)


def test_a_window_expires_while_batch_follows_batch(bench: MakeBench) -> None:
    """The device is never idle here, and the first batch not done when the window's time is up."""
    b = bench(n_windows=8, max_batch=1)
    device = Device(b)
    first = b.hold("first")
    late = b.submit(make_pcm(0.1), "late", remaining_s=0.05)
    rest = [b.submit(make_pcm(0.1), f"r{n}") for n in range(2)]
    wait_until(lambda: b.engine.stats().slack_s < 0)
    b.gate.set()
    with pytest.raises(DeadlineExceededError):
        late.result(PATIENCE_S)
    assert ("done", 1) not in device.events
    assert b.engine.stats().expired == 1
    device.complete(3)
    for future in (first, *rest):
        b.engine.revoke(future.result(PATIENCE_S).handle)
    b.exporter.pool.check_integrity()


def test_windows_that_nobody_reads_leave_room_in_the_pool(bench: MakeBench) -> None:
    """However long the next batch is launched before the last one is done."""
    b = bench(n_windows=8, max_batch=1)
    device = Device(b, lane=1)
    later = [b.submit(make_pcm(0.1 + n / 100), f"r{n}", priority="later") for n in range(12)]
    device.complete(len(later))
    wait_until(lambda: sum(future.done() for future in later) == 7)
    b.submit(make_pcm(0.5), "urgent").result(PATIENCE_S)
    assert sum(future.done() for future in later) == 7
    for future in later:
        if not future.cancel():
            b.engine.revoke(future.result().handle)


def test_a_batch_that_never_returns_is_told(bench: MakeBench) -> None:
    """A GPU that hangs holds its worker's thread for ever, and Serve asks only who answers."""
    now_s = 0.0
    b = bench(clock=lambda: now_s)
    device = Device(b)
    future = b.submit(make_pcm(0.1), remaining_s=1e6)
    wait_until(lambda: device.events == [("launched", 1)])
    now_s = STUCK_S - 1.0
    assert b.engine.healthy() is None
    now_s = 10 * SLOWEST_WINDOW_S * 8 + 1.0
    assert "has not returned" in str(b.engine.healthy())
    device.complete()
    future.result(PATIENCE_S)
    wait_until(lambda: not b.engine.stats().running)
    now_s *= 1000.0
    assert b.engine.healthy() is None, "nothing is there"


def test_a_device_error_ends_the_replica_and_every_window(bench: MakeBench) -> None:
    """After such an error no call of this process succeeds: the replica must be replaced."""
    b = bench()
    b.poisoned_by, b.poison = torch.AcceleratorError("an illegal memory access"), 1_600
    future = b.submit(make_pcm(0.1))
    with pytest.raises(WorkerDiedError, match="illegal memory access"):  # a try of the window's
        future.result(PATIENCE_S)
    wait_until(lambda: b.engine.healthy() is not None)
    with pytest.raises(WorkerDrainingError, match="thread died"):
        b.submit(make_pcm(0.2))

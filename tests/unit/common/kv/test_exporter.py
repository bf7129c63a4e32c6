"""The exporter's side alone, over the memory transport: what it refuses and what it survives."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.common.errors import ConfigurationError, WorkerDrainingError
from cluster.common.kv import exporter as exporter_module
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.handles import release_message
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.memory_wire import MemoryWire
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import TransferConfig
from cluster.common.messages import CrossKVHandle
from tests.support.kv.ends import MemoryExporter, wait_until

LAYOUT = PageLayout("exporter", 1, 1, 4, 10, 5, "float32")
KEY = b"key"
CONFIG = TransferConfig(KEY, "encoder", "memory")


@pytest.fixture
def exporter() -> Iterator[MemoryExporter]:
    made = MemoryExporter(LAYOUT, 6, cluster_key=KEY)
    yield made
    made.close()


def publish(exporter: MemoryExporter, pages: tuple[int, ...], frames: int = 10) -> CrossKVHandle:
    return exporter.publish(pages, request_id="r", window=0, attempt=0, frames=frames)


def reserve(exporter: MemoryExporter, n_pages: int = 2) -> tuple[int, ...]:
    pages = exporter.reserve(n_pages)
    assert pages is not None
    return pages


def test_a_closed_exporter_takes_nothing_and_holds_nothing() -> None:
    exporter = MemoryExporter(LAYOUT, 6, cluster_key=KEY)
    publish(exporter, reserve(exporter))
    assert exporter.healthy() is None
    exporter.close()
    exporter.close()
    exporter.check_integrity()
    assert exporter.healthy() is not None
    with pytest.raises(WorkerDrainingError):
        exporter.reserve(1)


class BrokenWire(MemoryWire):
    def __init__(self, opens: bool) -> None:
        super().__init__(CONFIG)
        self.opens = opens

    def open(self, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        if not self.opens:
            raise OSError("no such device")

    def drain(self) -> list[bytes]:
        raise RuntimeError("the agent is gone")


def test_a_transport_that_cannot_start_says_so() -> None:
    with pytest.raises(ConfigurationError, match="no such device"):
        KVExporter(LAYOUT, 2, CONFIG, BrokenWire(opens=False))


def test_a_dead_thread_shows_and_frees_the_pages() -> None:
    exporter = KVExporter(LAYOUT, 2, CONFIG, BrokenWire(opens=True))
    wait_until(lambda: exporter.healthy() is not None)
    assert "the agent is gone" in (exporter.healthy() or "")
    exporter.close()
    exporter.check_integrity()


def test_leases_that_begin_together_end_the_idle_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else releases of a transport that must be polled would be seen when it is over."""
    monkeypatch.setattr(exporter_module, "IDLE_POLL_S", 60.0)
    exporter, both = MemoryExporter(LAYOUT, 6, cluster_key=KEY), threading.Barrier(2)
    make_handle = exporter._handle

    def make_late(*args: Any) -> CrossKVHandle:
        both.wait(20.0)
        return make_handle(*args)

    monkeypatch.setattr(exporter, "_handle", make_late)
    with ThreadPoolExecutor(2) as threads:
        handles = list(threads.map(publish, [exporter] * 2, [reserve(exporter) for _ in range(2)]))
    exporter.memory.on_notification = lambda: None
    for handle in handles:
        exporter.memory._receive(release_message(handle.lease))
    wait_until(lambda: exporter.n_leases == 0)
    exporter.close()


def test_leases_of_the_same_pages_run_out_one_by_one() -> None:
    now = [0.0]
    exporter = MemoryExporter(LAYOUT, 2, cluster_key=KEY, lease_s=10.0, clock=lambda: now[0])
    names = {"request_id": "r", "window": 0, "attempt": 0}
    exporter.publish(reserve(exporter), frames=10, key=b"a", **names)  # type: ignore[arg-type]
    now[0] += 5.0
    again = exporter.publish_again(b"a", **names)  # type: ignore[arg-type]
    assert again is not None
    now[0] += 5.0
    wait_until(lambda: exporter.n_expired == 1)
    assert (exporter.n_read_pages, exporter.n_kept) == (2, 0)
    exporter.handle_notifications([b"REN:" + again.lease.encode()])
    now[0] += 9.9
    exporter.expire()
    assert exporter.n_leases == 1, "a renewal counts from its arrival"
    now[0] += 0.1
    exporter.expire()
    assert (exporter.n_read_pages, exporter.n_kept, exporter.n_kept_pages) == (0, 1, 2)
    exporter.close()


def test_no_lease_ends_for_a_time_in_which_the_exporter_was_held_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a process that was stopped would lose what readers of its own could not renew."""
    now = [0.0]
    monkeypatch.setattr(exporter_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    exporter = MemoryExporter(LAYOUT, 2, cluster_key=KEY, lease_s=10.0, clock=lambda: now[0])
    drain, entered, goes_on = exporter.memory.drain, threading.Event(), threading.Event()

    def held_up() -> Sequence[bytes]:
        entered.set()
        goes_on.wait(20.0)
        return drain()

    publish(exporter, reserve(exporter))
    monkeypatch.setattr(exporter.memory, "drain", held_up)
    assert entered.wait(20.0)
    now[0] += 60.0
    goes_on.set()
    entered.clear()
    assert entered.wait(20.0), "it has looked since then"
    assert exporter.n_leases == 1
    for _ in range(44):  # as it goes on, time counts again
        entered.clear()
        now[0] += 0.25
        assert entered.wait(20.0)
    wait_until(lambda: exporter.n_expired == 1)
    exporter.close()
    exporter.check_integrity()

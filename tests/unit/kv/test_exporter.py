"""The exporter's side alone, over the memory transport: what it refuses and what it survives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.errors import ConfigurationError, WorkerDrainingError
from cluster.kv.exporter import Exporter
from cluster.kv.layout import KVLayout
from cluster.kv.leases import GenerationCounters
from cluster.kv.memory import MemoryExporter
from cluster.kv.pool import PagePool
from cluster.messages import CrossKVHandle

LAYOUT = KVLayout("exporter", 1, 1, 4, 10, 5, "float32")
KEY = b"key"


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


def test_the_generation_changes_whenever_pages_change_hands(exporter: MemoryExporter) -> None:
    seen = []
    for _ in range(3):
        handle = publish(exporter, reserve(exporter))
        seen.append(handle.generation)
        assert exporter.revoke(handle.lease)
        exporter.abandon(reserve(exporter))
    assert len(set(seen)) == 3
    exporter.pool.check_integrity()


def test_a_full_pool_reserves_nothing_until_a_release(exporter: MemoryExporter) -> None:
    first = publish(exporter, reserve(exporter))
    exporter.abandon(reserve(exporter))
    reserve(exporter, 4)
    assert exporter.reserve(1) is None
    exporter.handle_notifications([b"REL:" + first.lease.encode()])
    assert exporter.reserve(2) is not None


def test_mistakes_of_the_engine_are_refused(exporter: MemoryExporter) -> None:
    pages = reserve(exporter)
    with pytest.raises(ValueError, match="frames"):
        publish(exporter, pages, frames=11)
    with pytest.raises(ValueError, match="cannot hold"):
        publish(exporter, pages[:1], frames=6)
    with pytest.raises(ValueError, match="cannot hold"):
        publish(exporter, (*pages, *reserve(exporter)))
    with pytest.raises(RuntimeError, match="free"):
        publish(exporter, (4, 5))
    publish(exporter, pages)
    with pytest.raises(ValueError, match="leased"):
        publish(exporter, pages)
    with pytest.raises(ValueError, match="leased"):
        exporter.abandon(pages)


def test_untrusted_notifications_change_nothing(exporter: MemoryExporter) -> None:
    handle = publish(exporter, reserve(exporter))
    lease = handle.lease.encode()
    exporter.handle_notifications(
        [b"", b"\xff" * 9000, b"REL:" + b"0" * 32, b"REN:" + b"1" * 32, b"REL:" + lease[:-1]]
    )
    assert exporter.active_leases() == 1
    assert (exporter.n_malformed, exporter.n_ignored) == (3, 2)
    exporter.handle_notifications([b"REL:" + lease, b"REL:" + lease, b"REN:" + lease])
    assert exporter.active_leases() == 0
    assert (exporter.n_malformed, exporter.n_ignored) == (3, 4)
    exporter.pool.check_integrity()


def test_a_closed_exporter_takes_nothing_and_holds_nothing() -> None:
    exporter = MemoryExporter(LAYOUT, 6, cluster_key=KEY)
    publish(exporter, reserve(exporter))
    assert exporter.healthy() is None
    exporter.close()
    exporter.close()
    exporter.pool.check_integrity()
    assert exporter.healthy() is not None
    with pytest.raises(WorkerDrainingError):
        exporter.reserve(1)


class BrokenInbox:
    transport = "broken"
    agent = "broken"
    metadata = b""

    def __init__(self, works: bool) -> None:
        self.works = works

    def open(self, pool: PagePool, counters: GenerationCounters) -> None:
        if not self.works:
            raise OSError("no such device")

    def drain(self) -> list[bytes]:
        raise RuntimeError("the agent is gone")

    def close(self) -> None:
        pass


def test_a_transport_that_cannot_start_says_so() -> None:
    with pytest.raises(ConfigurationError, match="no such device"):
        Exporter(LAYOUT, 2, BrokenInbox(works=False), cluster_key=KEY)


def test_a_dead_thread_shows_and_frees_the_pages() -> None:
    exporter = Exporter(LAYOUT, 2, BrokenInbox(works=True), cluster_key=KEY)
    exporter._thread.join(30.0)
    assert "the agent is gone" in (exporter.healthy() or "")
    exporter.pool.check_integrity()
    exporter.close()

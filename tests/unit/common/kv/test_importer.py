"""The importer's side alone: mistakes of its callers, and a wire that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from cluster.common.errors import (
    HandleRefusedError,
    PeerLostError,
    WorkerDrainingError,
)
from cluster.common.kv.handles import sign
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.kv.reader import FIRST_RENEWAL_S, LOST_S, MAX_PEERS, Fetch, Reader
from cluster.common.kv.wire import RENEW_S, Descriptor, TransferConfig
from cluster.common.messages import CrossKVHandle
from tests.support.kv.ends import MemoryExporter, memory_importer, wait_until

DEADLINE_S = 30.0
LAYOUT = PageLayout("importer", 1, 1, 4, 10, 5, "float32")
KEY = b"key"


class StubWire:
    transport = "stub"
    agent = "stub"
    metadata = b""
    on_notification: Callable[[], object]

    def __init__(self) -> None:
        self.done = True
        self.error: Exception | None = None
        self.n_reads = 0
        self.sent: list[bytes] = []
        self.connected: list[str] = []
        self.disconnected: list[str] = []

    def _operate(self) -> object:
        if self.error is not None:
            raise self.error
        return object()

    def open(self, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        self.landing = counters

    def drain(self) -> Sequence[bytes]:
        return ()

    def connect(self, agent: str, metadata: bytes) -> None:
        self.connected.append(agent)

    def disconnect(self, agent: str) -> None:
        self.disconnected.append(agent)

    def read_pages(self, agent: str, descs: Sequence[Descriptor]) -> object:
        self.n_reads += 1
        return self._operate()

    def read_counter(self, agent: str, local: int, remote: int, notification: bytes) -> object:
        self.n_reads += 1
        self.landing[:] = 7
        return self._operate()

    def poll(self, read: object) -> bool:
        self._operate()
        return self.done

    def notify(self, agent: str, payload: bytes) -> None:
        self.sent.append(payload)

    def close(self) -> None:
        pass


def make_handle(lease: int = 1, agent: str = "encoder-0") -> CrossKVHandle:
    addresses = (0, LAYOUT.page_bytes)
    unsigned = CrossKVHandle(
        "r", 0, 0, agent, b"", LAYOUT.hash, addresses, LAYOUT.page_bytes, 10, 0, 7,
        f"{lease:032x}", 10.0,
    )  # fmt: skip
    return sign(unsigned, KEY)


@pytest.fixture
def wire() -> StubWire:
    return StubWire()


@pytest.fixture
def importer(wire: StubWire) -> Iterator[KVImporter]:
    config = TransferConfig(KEY, "decoder", fetch_timeout_s=5.0, renew_s=0.05)
    made = KVImporter(LAYOUT, 8, config, wire)
    yield made
    made.close()


def take_pages(importer: KVImporter) -> tuple[int, ...]:
    pages = importer.pool.allocate(2)
    assert pages is not None
    return pages


def test_a_dead_thread_fails_every_fetch_and_shows(importer: KVImporter, wire: StubWire) -> None:
    wire.done = False
    handles = [make_handle(n) for n in (1, 2)]
    for handle in handles:
        importer.accept(handle)
    pages = [take_pages(importer) for _ in handles]
    futures = [importer.fetch(h, p) for h, p in zip(handles, pages, strict=True)]
    wire.error = MemoryError("a bug")
    for future in futures:
        assert isinstance(future.exception(DEADLINE_S), WorkerDrainingError)
    wait_until(lambda: "a bug" in (importer.healthy() or ""))
    with pytest.raises(WorkerDrainingError, match="a bug"):
        importer.accept(make_handle(3))
    for page_set in pages:
        importer.pool.release(page_set)
    importer.pool.check_integrity()


def test_a_wire_that_does_not_return_makes_its_importer_unwell(
    importer: KVImporter, wire: StubWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    monkeypatch.setattr(wire, "connect", lambda *_: held.wait(DEADLINE_S))
    with monkeypatch.context() as patch:
        patch.setattr("cluster.common.kv.importer.STUCK_S", 0.05)
        importer.accept(make_handle())
        wait_until(lambda: "has not returned" in str(importer.healthy()))
        held.set()
        wait_until(lambda: importer.healthy() is None)


def test_a_handle_that_points_outside_the_pool_reads_nothing() -> None:
    """Signed, so by one of ours, but wrong: it fails alone."""
    exporter = MemoryExporter(LAYOUT, 4, cluster_key=KEY)
    importer = memory_importer(LAYOUT, 4, cluster_key=KEY)
    pages = exporter.reserve(2)
    assert pages is not None
    handle = exporter.publish(pages, request_id="r", window=0, attempt=0, frames=10)
    wrong = sign(replace(handle, addresses=(handle.addresses[0], 4096)), KEY)
    importer.accept(wrong)
    target = take_pages(importer)
    with pytest.raises(Exception, match="no page"):
        importer.fetch(wrong, target).result(DEADLINE_S)
    importer.pool.release(target)
    wait_until(lambda: exporter.n_leases == 0)
    importer.close()
    exporter.close()


# ---- The reader on the test's own thread and clock: no second passes, whatever the timeouts are.


@dataclass
class Bench:
    wire: StubWire = field(default_factory=StubWire)
    now: float = 0.0

    def __post_init__(self) -> None:
        config = TransferConfig(KEY, "decoder", clock=lambda: self.now)
        self.pool = PagePool(LAYOUT, 8)
        self.refused: list[str] = []
        self.reader = Reader(self.pool, self.wire, config, self.refused.append)
        self.reader.open()

    def begin(self, handle: CrossKVHandle) -> Fetch:
        """Accept the handle, and post the read of its payload."""
        self.accept(handle)
        pages = self.pool.allocate(2)
        assert pages is not None
        fetch = Fetch(handle, pages, Future())
        self.reader.start(fetch)
        return fetch

    def accept(self, handle: CrossKVHandle) -> None:
        self.reader.check(handle.agent)
        self.reader.hold(handle)

    def renewed(self) -> list[bytes]:
        self.reader.step()
        sent, self.wire.sent = self.wire.sent, []
        return sent


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_what_was_read_of_a_peer_that_another_read_lost_is_lost_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its counter is not asked for by a wire that knows the peer no more, and would refuse it."""
    bench.wire.done = False
    fetches = [bench.begin(make_handle(n)) for n in (1, 2)]
    answers: Iterator[Exception | bool] = iter((True, PeerLostError("gone"), True))

    def poll(_: object) -> bool:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def refuse(agent: str, *_: object) -> object:
        assert agent in bench.wire.disconnected
        raise HandleRefusedError("no such memory")

    monkeypatch.setattr(bench.wire, "poll", poll)
    monkeypatch.setattr(bench.wire, "read_counter", refuse)
    bench.reader.step()
    assert bench.wire.disconnected == ["encoder-0"]
    assert [type(one.future.exception(0)) for one in fetches] == [PeerLostError] * 2


def test_a_lost_peer_may_come_back_after_a_while(bench: Bench) -> None:
    bench.wire.done = False
    fetch = bench.begin(make_handle(1))
    bench.accept(make_handle(2))
    bench.wire.error = PeerLostError("gone")
    bench.reader.step()
    assert isinstance(fetch.future.exception(0), PeerLostError)
    assert bench.wire.disconnected == ["encoder-0"]
    bench.wire.error = None
    with pytest.raises(PeerLostError):
        bench.accept(make_handle(3))
    bench.now += LOST_S
    bench.accept(make_handle(3))
    assert bench.renewed() == []  # what was held of it is held no longer
    bench.now += FIRST_RENEWAL_S
    assert bench.renewed() == [renewal_of(3)]


def test_a_connection_that_fails_is_tried_again_by_the_fetch(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PeerLostError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(bench.wire, "connect", fail)
        bench.accept(make_handle(1))
        lost = bench.begin(make_handle(2))
        assert isinstance(lost.future.exception(0), PeerLostError)
        bench.accept(make_handle(3, "encoder-1"))
    bench.now += FIRST_RENEWAL_S
    bench.begin(make_handle(2)).future.result(0)
    assert bench.renewed() == [renewal_of(1)], "it may wait for long"
    bench.begin(make_handle(1)).future.result(0)
    assert bench.wire.connected == ["encoder-0"]
    monkeypatch.setattr(bench.wire, "poll", fail)
    n_reads = bench.wire.n_reads
    lost = Fetch(make_handle(3, "encoder-1"), lost.pages, Future())
    bench.reader.start(lost)
    assert isinstance(lost.future.exception(0), PeerLostError)
    assert bench.wire.n_reads == n_reads + 1, "nothing is read of one that the warming read lost"


def test_leases_are_renewed_by_the_clock(bench: Bench) -> None:
    """Soon after one is accepted, since it may be about to run out; then at intervals."""
    bench.begin(make_handle(1)).future.result(0)
    bench.now += FIRST_RENEWAL_S
    assert bench.renewed() == []
    assert bench.reader.wait_s() is None
    bench.now += RENEW_S
    bench.accept(make_handle(2))
    bench.accept(make_handle(3, "encoder-1"))
    assert bench.renewed() == [], "most are fetched before it"
    bench.now += FIRST_RENEWAL_S
    assert sorted(bench.renewed()) == [renewal_of(2), renewal_of(3)]
    assert bench.reader.wait_s() == RENEW_S
    bench.now += RENEW_S
    bench.reader.drop(make_handle(3, "encoder-1"))
    assert bench.renewed() == [b"REL:" + renewal_of(3)[4:], renewal_of(2)]
    bench.reader.drop(make_handle(2))
    bench.now += RENEW_S
    assert bench.renewed() == [b"REL:" + renewal_of(2)[4:]]
    assert bench.reader.wait_s() is None


def test_short_leases_are_renewed_in_good_time(bench: Bench) -> None:
    """As an exporter of another version may have them: the handle says how long they last."""
    bench.accept(replace(make_handle(1), remaining_s=1.5))
    bench.now += FIRST_RENEWAL_S
    assert bench.renewed() == [renewal_of(1)]
    assert bench.reader.wait_s() == pytest.approx(0.5)


def renewal_of(lease: int) -> bytes:
    return b"REN:" + make_handle(lease).lease.encode()


def test_of_too_many_peers_those_that_were_not_read_from_for_longest_go(bench: Bench) -> None:
    """A decoder that meets each of thousands of encoders keeps the connections that it uses."""
    kept = make_handle(0, "encoder-held")
    bench.begin(kept).future.result(0)
    bench.accept(make_handle(1, "encoder-held"))
    for n in range(3 * MAX_PEERS):
        bench.now += 0.01
        fetch = bench.begin(make_handle(n + 2, f"encoder-{n}"))
        fetch.future.result(0)
        bench.pool.release(fetch.pages)
        gone = len(bench.wire.disconnected)
        assert len(bench.wire.connected) - gone <= MAX_PEERS
    n_gone = 3 * MAX_PEERS - (MAX_PEERS - 1)
    expected = [f"encoder-{n}" for n in range(3 * MAX_PEERS)]
    assert bench.wire.disconnected == expected[: len(bench.wire.disconnected)]
    assert n_gone <= len(bench.wire.disconnected) <= n_gone + MAX_PEERS // 8

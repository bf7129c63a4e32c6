"""The importer's side alone: mistakes of its callers, and a wire that misbehaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.common.errors import (
    KVLostError,
    PeerLostError,
    TransferTimeoutError,
    WorkerDrainingError,
)
from cluster.common.kv.handles import sign
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.peers import FIRST_RENEWAL_S, LOST_S, MAX_PEERS, HeldHandles
from cluster.common.kv.pool import PagePool
from cluster.common.kv.reader import Fetch, Reader
from cluster.common.kv.wire import RENEW_S, TransferConfig
from cluster.common.messages import CrossKVHandle
from tests.support.kv.ends import MemoryExporter, memory_importer, wait_until
from tests.support.kv.stub_wire import KEY, LAYOUT, StubWire, make_handle

DEADLINE_S = 30.0


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


def test_a_handle_is_fetched_once_at_a_time(importer: KVImporter, wire: StubWire) -> None:
    wire.done = False
    handle, pages, others = make_handle(), take_pages(importer), take_pages(importer)
    importer.accept(handle)
    importer.accept(handle)
    first = importer.fetch(handle, pages)
    with pytest.raises(KVLostError, match="already"):
        importer.fetch(handle, others).result(DEADLINE_S)
    assert not first.cancel()
    wire.done = True
    first.result(DEADLINE_S)


def test_short_leases_are_renewed_in_good_time(wire: StubWire) -> None:
    """As an exporter of another version may have them: the handle says how long they last."""
    config = TransferConfig(KEY, "decoder", renew_s=3600.0)
    importer = KVImporter(LAYOUT, 8, config, wire)
    try:
        importer.accept(sign(replace(make_handle(), remaining_s=0.6), KEY))
        wait_until(lambda: sum(payload.startswith(b"REN:") for payload in wire.sent) >= 3)
    finally:
        importer.close()


def test_a_lost_peer_is_removed_only_when_nothing_of_it_is_in_flight(
    importer: KVImporter, wire: StubWire
) -> None:
    wire.done = False
    handles = [make_handle(n) for n in (1, 2)]
    futures = []
    for handle in handles:
        importer.accept(handle)
        futures.append(importer.fetch(handle, take_pages(importer)))
    wait_until(lambda: wire.n_reads == 3)  # a warming one and two payloads
    assert wire.disconnected == []
    wire.error = PeerLostError("gone")
    for future in futures:
        assert isinstance(future.exception(DEADLINE_S), PeerLostError)
    wait_until(lambda: wire.disconnected == ["encoder-0"])
    with pytest.raises(PeerLostError):
        importer.accept(make_handle(3))
    importer.accept(make_handle(4, "encoder-1"))
    assert importer.healthy() is None


def test_a_lost_peer_may_come_back_after_a_while() -> None:
    now = [0.0]
    held = HeldHandles(lambda: now[0])
    held.hold(make_handle(1))
    held.lose("encoder-0")
    assert len(held) == 0
    with pytest.raises(PeerLostError):
        held.hold(make_handle(2))
    now[0] += LOST_S
    held.hold(make_handle(2))


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


@given(
    st.lists(st.tuples(st.sampled_from(["hold", "let_go", "lose", "waiting"]), st.integers(0, 11)))
)
def test_leases_are_found_by_their_exporter_whatever_came_and_went(
    steps: list[tuple[str, int]],
) -> None:
    now = 0.0
    held = HeldHandles(lambda: now)
    expected: dict[str, str] = {}  # agents, by lease
    for step, number in steps:
        now += LOST_S + 1.0
        handle = make_handle(number, f"encoder-{number % 3}")
        if step == "hold":
            held.hold(handle)
            expected[handle.lease] = handle.agent
        elif step == "let_go":
            assert held.let_go(handle.lease) == (expected.pop(handle.lease, None) is not None)
        elif step == "lose":
            held.lose(handle.agent)
            expected = {lease: by for lease, by in expected.items() if by != handle.agent}
        else:
            assert {one.lease for one in held.let_go_of_all(but_fetching=True)} == expected.keys()
            expected = {}
        assert held.agents() == set(expected.values())
        assert len(held) == len(expected)
        for agent in ("encoder-0", "encoder-1", "encoder-2"):
            mine = {lease for lease, by in expected.items() if by == agent}
            assert set(held.leases_of(agent)) == mine


# ---- The reader on the test's own thread and clock: no second passes, whatever the timeouts are.


@dataclass
class Bench:
    """A reader over a stub."""

    wire: StubWire = field(default_factory=StubWire)
    now: float = 0.0

    def __post_init__(self) -> None:
        config = TransferConfig(KEY, "decoder", clock=lambda: self.now)
        self.pool = PagePool(LAYOUT, 8)
        self.held = HeldHandles(config.clock)
        self.reader = Reader(self.pool, self.wire, self.held, config)
        self.reader.open()

    def begin(self, handle: CrossKVHandle) -> Fetch:
        """Accept the handle, and post the read of its payload."""
        self.held.hold(handle)
        self.held.begin_fetch(handle)
        pages = self.pool.allocate(2)
        assert pages is not None
        fetch = Fetch(handle, pages, Future())
        self.reader.start(fetch)
        return fetch


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_read_is_overdue_by_the_clock_that_it_is_given(bench: Bench) -> None:
    """Its pages are in quarantine, and its peer suspect, until the read ends."""
    bench.wire.done = False
    fetch = bench.begin(make_handle(1))
    bench.now += 9.9
    bench.reader.step()
    assert not fetch.future.done()
    bench.now += 0.1
    bench.reader.step()
    assert isinstance(fetch.future.exception(0), TransferTimeoutError)
    assert bench.pool.n_quarantined == 2
    with pytest.raises(PeerLostError, match="overdue"):
        bench.held.hold(make_handle(2))
    bench.wire.done = True
    bench.reader.step()
    bench.pool.check_integrity()
    bench.held.hold(make_handle(2))


def test_leases_are_renewed_by_the_clock(bench: Bench) -> None:
    bench.begin(make_handle(1)).future.result(0)
    bench.held.hold(make_handle(2))
    assert bench.reader.wait_s() == RENEW_S
    bench.reader.step()
    assert bench.wire.sent == []
    bench.now += RENEW_S
    bench.reader.step()
    assert bench.wire.sent == [b"REN:" + make_handle(2).lease.encode()]
    bench.held.let_go(make_handle(2).lease)
    assert bench.reader.wait_s() is None


def test_the_lease_of_an_accepted_handle_is_renewed_soon(bench: Bench) -> None:
    """It may be about to run out, however long it takes until its peer's next renewal is due."""
    bench.begin(make_handle(1)).future.result(0)
    bench.now += RENEW_S / 2
    bench.held.hold(make_handle(2))
    bench.reader.connect(make_handle(2))
    assert bench.reader.wait_s() == pytest.approx(FIRST_RENEWAL_S)
    renewal = b"REN:" + make_handle(2).lease.encode()
    bench.now += FIRST_RENEWAL_S
    bench.reader.step()
    assert bench.wire.sent == [renewal]
    bench.now += RENEW_S
    bench.reader.step()
    assert bench.wire.sent == [renewal, renewal]


def test_of_too_many_peers_those_that_were_not_read_from_for_longest_go(bench: Bench) -> None:
    """A decoder that meets each of thousands of encoders keeps the connections that it uses."""
    kept = make_handle(0, "encoder-held")
    bench.begin(kept).future.result(0)
    bench.held.hold(make_handle(1, "encoder-held"))
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

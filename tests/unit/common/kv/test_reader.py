"""The reader on the test's own thread and clock: no second passes, whatever the timeouts are."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from cluster.common.errors import PeerLostError, TransferTimeoutError
from cluster.common.kv.peers import FIRST_RENEWAL_S, IDLE_PEER_S, MAX_PEERS, HeldHandles
from cluster.common.kv.pool import PagePool
from cluster.common.kv.reader import Fetch, Reader
from cluster.common.kv.wire import RENEW_S, TransferConfig
from cluster.common.messages import CrossKVHandle
from tests.support.kv.stub_wire import KEY, LAYOUT, StubWire, make_handle


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


def test_leases_are_renewed_and_idle_peers_forgotten_by_the_clock(bench: Bench) -> None:
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
    bench.now += IDLE_PEER_S + 1.0
    bench.begin(make_handle(3, "encoder-1")).future.result(0)
    assert bench.wire.connected == ["encoder-0", "encoder-1"]
    assert bench.wire.disconnected == ["encoder-0"]


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

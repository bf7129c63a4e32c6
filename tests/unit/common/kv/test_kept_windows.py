"""Kept KV: whatever happens, a handle whose generation holds reads what was published for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.common.kv.handles import verify
from cluster.common.kv.layout import PageLayout
from cluster.common.messages import CrossKVHandle
from tests.support.kv.ends import MemoryExporter, wait_until

LAYOUT = PageLayout("kept", 1, 1, 4, 10, 5, "float32")
KEY = b"key"
N_PAGES = 6
NAMES: dict[str, Any] = {"request_id": "r", "window": 0, "attempt": 0}


def make_exporter(**options: Any) -> MemoryExporter:
    return MemoryExporter(LAYOUT, N_PAGES, cluster_key=KEY, **options)


def publish(exporter: MemoryExporter, key: bytes, value: float, n_pages: int = 2) -> CrossKVHandle:
    pages = exporter.reserve(n_pages)
    assert pages is not None
    exporter.pool.tensor[list(pages)] = value
    return exporter.publish(pages, frames=5 * n_pages, key=key, **NAMES)


def release(exporter: MemoryExporter, handle: CrossKVHandle) -> None:
    exporter.handle_notifications([b"REL:" + handle.lease.encode()])


def found(exporter: MemoryExporter, handle: CrossKVHandle) -> tuple[int, float]:
    pages = [exporter.pool.page_at(address) for address in handle.addresses]
    values = exporter.pool.tensor[pages].unique().tolist()
    assert len(values) == 1, "pages of one handle hold two windows"
    return int(exporter.counters[pages[0]]), values[0]


def test_what_was_released_longest_ago_is_evicted_first() -> None:
    """Kept pages count as free, and an eviction changes their generation."""
    exporter = make_exporter()
    kept = {key: publish(exporter, key, value) for value, key in enumerate((b"a", b"b", b"c"))}
    for key in (b"c", b"a", b"b"):
        release(exporter, kept[key])
    again = exporter.publish_again(b"a", **NAMES)
    assert again is not None
    release(exporter, again)  # from now on it is the newest
    assert (exporter.pool.n_free, exporter.n_free_pages) == (0, N_PAGES)
    for n_evicted, key in enumerate((b"c", b"b", b"a"), 1):
        assert found(exporter, kept[key])[0] == kept[key].generation
        assert exporter.reserve(2) is not None
        assert found(exporter, kept[key])[0] != kept[key].generation
        assert exporter.publish_again(key, **NAMES) is None
        assert exporter.n_evicted == n_evicted
    exporter.check_integrity(n_reserved=N_PAGES)
    exporter.close()


@dataclass
class Issued:
    handle: CrossKVHandle
    value: float
    is_open: bool = True


class KeptWindows(RuleBasedStateMachine):
    """Publishes, reads again, releases and evicts in any order, with a few keys and pages."""

    keys = st.sampled_from([b"", b"a", b"b", b"c"])

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[Issued] = []
        self.newest: dict[bytes, float] = {}  # by key, what was published last
        self.reserved: list[tuple[int, ...]] = []
        self.n_values = 0

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.exporter = make_exporter(lease_s=60.0, clock=lambda: self.now)

    @property
    def open(self) -> list[Issued]:
        return [one for one in self.issued if one.is_open]

    @rule(key=keys, n_pages=st.sampled_from([1, 2]))
    def publish(self, key: bytes, n_pages: int) -> None:
        free = self.exporter.n_free_pages
        pages = self.exporter.reserve(n_pages)
        assert (pages is not None) == (free >= n_pages)
        if pages is None:
            return
        self.n_values += 1
        self.exporter.pool.tensor[list(pages)] = float(self.n_values)
        handle = self.exporter.publish(pages, frames=5 * n_pages, key=key, **NAMES)
        self.issued.append(Issued(handle, self.n_values))
        if key:
            self.newest[key] = self.n_values

    @rule(key=keys.filter(bool))
    def publish_again(self, key: bytes) -> None:
        handle = self.exporter.publish_again(key, **NAMES)
        assert handle is not None or key not in self.newest or self.exporter.n_evicted
        if handle is not None:
            verify(handle, KEY)
            assert found(self.exporter, handle)[1] == self.newest[key]
            self.issued.append(Issued(handle, self.newest[key]))

    @rule()
    def reserve(self) -> None:
        if (pages := self.exporter.reserve(2)) is not None:
            self.reserved.append(pages)
            self.exporter.pool.tensor[list(pages)] = -1.0  # as an encoder that is at work

    @precondition(lambda self: self.reserved)
    @rule()
    def abandon(self) -> None:
        self.exporter.abandon(self.reserved.pop())

    @precondition(lambda self: self.open)
    @rule(data=st.data(), by_notification=st.booleans())
    def end(self, data: st.DataObject, by_notification: bool) -> None:
        one = data.draw(st.sampled_from(self.open))
        one.is_open = False
        if by_notification:
            release(self.exporter, one.handle)
            release(self.exporter, one.handle)  # the second one is of no lease
        else:
            assert self.exporter.revoke(one.handle.lease)

    @rule()
    def leases_run_out(self) -> None:
        self.now += 61.0
        wait_until(lambda: not self.exporter.n_leases and not self.exporter.n_read_pages)
        for one in self.issued:
            one.is_open = False

    @invariant()
    def nothing_is_lost_and_nothing_is_stale(self) -> None:
        n_reserved = sum(map(len, self.reserved))
        self.exporter.check_integrity(len(self.open), n_reserved)
        read = {address for one in self.open for address in one.handle.addresses}
        assert self.exporter.n_free_pages == N_PAGES - n_reserved - len(read)
        for one in self.issued:
            page = self.exporter.pool.page_at(one.handle.addresses[0])
            generation = int(self.exporter.counters[page])
            assert generation == one.handle.generation or not one.is_open
            if generation == one.handle.generation:
                assert found(self.exporter, one.handle)[1] == one.value

    def teardown(self) -> None:
        if hasattr(self, "exporter"):
            self.exporter.close()
            n_reserved = sum(map(len, self.reserved))
            self.exporter.check_integrity(n_reserved=n_reserved)
            assert self.exporter.pool.n_free == N_PAGES - n_reserved


TestKeptWindows = KeptWindows.TestCase
TestKeptWindows.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)

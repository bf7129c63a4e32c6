"""Leases end once and in time; generation counters change whenever a page changes hands."""

from __future__ import annotations

import ctypes

import pytest

from cluster.kv.generations import GenerationCounters
from cluster.kv.leases import LeaseTable


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(10.0, clock)


def test_a_lease_expires_on_the_local_clock(table: LeaseTable, clock: Clock) -> None:
    lease = table.open((3, 4))
    clock.now += 9.9
    assert table.expire() == []
    clock.now += 0.1
    assert table.expire() == [(3, 4)]
    assert len(table) == 0
    assert table.n_expired == 1
    assert table.end(lease.id) is None


def test_a_renewal_counts_from_its_arrival(table: LeaseTable, clock: Clock) -> None:
    kept, left = table.open((0,)), table.open((1,))
    clock.now += 9.0
    table.renew([kept.id])
    clock.now += 9.0
    assert table.expire() == [(1,)]
    assert len(table) == 1
    table.renew([left.id])
    assert table.n_ignored == 1
    clock.now += 1.0
    assert table.expire() == [(0,)]


def test_a_lease_ends_once_and_strangers_are_counted(table: LeaseTable) -> None:
    lease = table.open((5,))
    assert table.end("0" * 32) is None
    assert table.end(lease.id) == (5,)
    assert table.end(lease.id) is None
    table.renew(["x", lease.id])
    assert table.n_ignored == 4
    assert table.end_all() == []


def test_leases_of_the_same_pages_end_one_by_one(table: LeaseTable, clock: Clock) -> None:
    first = table.open((1, 2))
    clock.now += 5.0
    second = table.open((1, 2))
    assert first.id != second.id
    clock.now += 5.0
    assert table.expire() == [(1, 2)]
    assert table.end(first.id) is None
    assert table.end(second.id) == (1, 2)
    assert table.end_all() == []


def test_lease_ids_are_nonces(table: LeaseTable) -> None:
    ids = {table.open((page,)).id for page in range(100)}
    assert len(ids) == 100
    assert all(len(lease_id) == 32 for lease_id in ids)


def test_a_lease_must_last() -> None:
    with pytest.raises(ValueError, match="lease_s"):
        LeaseTable(0.0)


def test_counters_are_where_their_addresses_say() -> None:
    counters = GenerationCounters(4)
    before = [counters.value(page) for page in range(4)]
    counters.bump((1, 3))
    assert [counters.value(page) - before[page] for page in range(4)] == [0, 1, 0, 1]
    for page in range(4):
        assert ctypes.c_uint64.from_address(counters.address(page)).value == counters.value(page)


def test_counters_of_two_processes_start_apart() -> None:
    assert GenerationCounters(1).value(0) != GenerationCounters(1).value(0)

"""What is published is read under leases that end once, and kept in the order of release."""

from __future__ import annotations

import ctypes

import pytest

from cluster.common.kv.published import PublishedWindows

A, B, C = b"a", b"b", b"c"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def published(clock: Clock) -> PublishedWindows:
    return PublishedWindows(8, 10.0, clock)


def test_a_window_without_a_key_goes_with_its_reader(published: PublishedWindows) -> None:
    lease, freed = published.publish((1, 2), 10, b"")
    assert freed == ()
    assert (published.n_pages, published.n_read_pages, published.n_kept) == (2, 2, 0)
    assert published.end(lease.id) == (1, 2)
    published.check_integrity(0)
    assert published.n_pages == 0
    with pytest.raises(ValueError, match="cannot be published"):
        published.keep((1, 2), 10, b"")


def test_a_window_with_a_key_is_kept_and_opened_by_any_number(published: PublishedWindows) -> None:
    first, _ = published.publish((3, 4), 7, A)
    again = published.open(A)
    assert again is not None
    assert (again.window.pages, again.window.frames, again.window.readers) == ((3, 4), 7, 2)
    assert again.generation == first.generation == int(published.counters[3])
    assert again.id != first.id
    assert published.open(B) is None
    assert published.end(first.id) == ()
    assert (published.n_kept, published.n_kept_pages) == (0, 0)
    assert published.evict() == (), "somebody reads it"
    assert published.end(again.id) == ()
    assert (published.n_read_pages, published.n_kept, published.n_kept_pages) == (0, 1, 2)
    published.check_integrity(0)
    third = published.open(A)
    assert third is not None
    assert third.window is again.window
    published.check_integrity(1)


def test_what_was_released_longest_ago_is_evicted_first(published: PublishedWindows) -> None:
    leases = {key: published.publish((page,), 5, key)[0] for page, key in enumerate((A, B, C))}
    for key in (C, A, B):
        published.end(leases[key].id)
    again = published.open(B)
    assert again is not None
    published.end(again.id)  # from now on it is the newest
    assert [published.evict() for _ in range(4)] == [(2,), (0,), (1,), ()]
    assert published.n_evicted == 3
    assert published.open(A) is None
    published.check_integrity(0)


def test_pages_are_published_once(published: PublishedWindows) -> None:
    published.keep((1, 2), 5, A)
    for taken in ((2, 3), (1,)):
        with pytest.raises(ValueError, match="published"):
            published.publish(taken, 5, B)
        with pytest.raises(ValueError, match="published"):
            published.check_unpublished(taken)
    published.check_unpublished((0, 3))


def test_the_same_key_again_takes_the_place_of_what_was_there(published: PublishedWindows) -> None:
    published.keep((1,), 5, A)
    second, freed = published.publish((2,), 5, A)
    assert freed == (1,), "nobody reads the older one"
    _, freed = published.publish((3,), 5, A)
    assert freed == (), "somebody reads the older one"
    found = published.open(A)
    assert found is not None
    assert found.window.pages == (3,)
    published.check_integrity(3)
    assert published.end(second.id) == (2,), "nothing can find it any more"
    published.check_integrity(2)


def test_at_the_end_nothing_stays(published: PublishedWindows) -> None:
    published.publish((1,), 5, A)
    published.keep((2,), 5, B)
    assert sorted(published.end_all()) == [(), (1,), (2,)]
    assert published.open(A) is None
    assert (published.n_pages, published.n_leases) == (0, 0)


def test_a_reader_too_many_is_told(published: PublishedWindows) -> None:
    published.publish((1,), 5, A)
    with pytest.raises(RuntimeError, match="expected 2"):
        published.check_integrity(2)


def test_a_lease_expires_on_the_local_clock(published: PublishedWindows, clock: Clock) -> None:
    lease, _ = published.publish((3, 4), 5, b"")
    clock.now += 9.9
    assert published.expire() == []
    clock.now += 0.1
    assert published.expire() == [(3, 4)]
    assert (published.n_leases, published.n_expired) == (0, 1)
    assert published.end(lease.id) is None


def test_a_renewal_counts_from_its_arrival(published: PublishedWindows, clock: Clock) -> None:
    (kept, _), (left, _) = published.publish((0,), 5, b""), published.publish((1,), 5, b"")
    clock.now += 9.0
    published.renew([kept.id])
    clock.now += 9.0
    assert published.expire() == [(1,)]
    assert published.n_leases == 1
    published.renew([left.id])
    assert published.n_ignored == 1
    clock.now += 1.0
    assert published.expire() == [(0,)]


def test_a_lease_ends_once_and_strangers_are_counted(published: PublishedWindows) -> None:
    lease, _ = published.publish((5,), 5, b"")
    assert published.end("0" * 32) is None
    assert published.end(lease.id) == (5,)
    assert published.end(lease.id) is None
    published.renew(["x", lease.id])
    assert published.n_ignored == 4
    assert published.end_all() == []


def test_leases_of_the_same_pages_end_one_by_one(published: PublishedWindows, clock: Clock) -> None:
    first, _ = published.publish((1, 2), 5, A)
    clock.now += 5.0
    second = published.open(A)
    assert second is not None
    clock.now += 5.0
    assert published.expire() == [()]
    assert published.end(first.id) is None
    published.publish((3,), 5, A)  # so that nothing keeps the pages any more
    assert published.end(second.id) == (1, 2)


def test_lease_ids_are_nonces(published: PublishedWindows) -> None:
    published.keep((0,), 5, A)
    opened = [published.open(A) for _ in range(100)]
    ids = {lease.id for lease in opened if lease is not None}
    assert len(ids) == 100
    assert all(len(lease_id) == 32 for lease_id in ids)


def test_a_lease_must_last() -> None:
    with pytest.raises(ValueError, match="lease_s"):
        PublishedWindows(1, 0.0)


def test_counters_are_where_their_addresses_say(published: PublishedWindows) -> None:
    before = published.counters.tolist()
    for pages in ((1, 3), (5, 6)):
        published.bump(pages)
    now = published.counters.tolist()
    assert [b - a for a, b in zip(before, now, strict=True)] == [0, 1, 0, 1, 0, 1, 1, 0]
    for page in range(8):
        address = published.counter_address(page)
        assert ctypes.c_uint64.from_address(address).value == now[page]


def test_counters_of_two_processes_start_apart() -> None:
    assert PublishedWindows(1, 1.0).counters[0] != PublishedWindows(1, 1.0).counters[0]

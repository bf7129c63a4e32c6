"""What is published has counted readers; what is kept goes in order of release, and comes back."""

from __future__ import annotations

import pytest

from cluster.kv.published import PublishedWindows

A, B, C = b"a", b"b", b"c"


@pytest.fixture
def published() -> PublishedWindows:
    return PublishedWindows()


def test_a_window_without_a_key_goes_with_its_reader(published: PublishedWindows) -> None:
    assert published.add((1, 2), 10, b"", 1) == ()
    assert (published.n_pages, published.n_read, published.n_kept) == (2, 1, 0)
    assert published.close((1, 2)) == (1, 2)
    published.check_integrity(0)
    assert published.n_pages == 0
    with pytest.raises(RuntimeError, match="no reader"):
        published.close((1, 2))
    with pytest.raises(ValueError, match="cannot be published"):
        published.add((1, 2), 10, b"", 0)


def test_a_kept_window_is_opened_again_and_its_readers_are_counted(
    published: PublishedWindows,
) -> None:
    published.add((3, 4), 7, A, 1)
    again = published.open(A)
    assert again is not None
    assert (again.pages, again.frames, again.readers) == ((3, 4), 7, 2)
    assert published.open(B) is None
    assert published.close((3, 4)) == ()
    assert (published.n_kept, published.n_kept_pages) == (0, 0)
    assert published.evict() == (), "somebody reads it"
    assert published.close((3, 4)) == ()
    assert (published.n_read, published.n_kept, published.n_kept_pages) == (0, 1, 2)
    published.check_integrity(0)
    assert published.open(A) is again
    published.check_integrity(1)


def test_what_was_released_longest_ago_is_evicted_first(published: PublishedWindows) -> None:
    for page, key in enumerate((A, B, C)):
        published.add((page,), 5, key, 1)
    for page in (1, 2, 0):
        published.close((page,))
    assert published.open(B) is not None
    published.close((1,))  # from now on it is the newest
    assert [published.evict() for _ in range(4)] == [(2,), (0,), (1,), ()]
    assert published.n_evicted == 3
    assert published.open(A) is None
    published.check_integrity(0)


def test_pages_are_published_once(published: PublishedWindows) -> None:
    published.add((1, 2), 5, A, 0)
    for taken in ((2,), (0, 1)):
        with pytest.raises(ValueError, match="published"):
            published.add(taken, 5, B, 1)
        with pytest.raises(ValueError, match="published"):
            published.check_unpublished(taken)
    published.check_unpublished((0, 3))


def test_a_newer_window_of_the_same_key_takes_the_place_of_the_older(
    published: PublishedWindows,
) -> None:
    published.add((1,), 5, A, 0)
    assert published.add((2,), 5, A, 1) == (1,), "nobody reads the older one"
    assert published.add((3,), 5, A, 1) == (), "somebody reads the older one"
    found = published.open(A)
    assert found is not None
    assert found.pages == (3,)
    published.check_integrity(3)
    assert published.close((2,)) == (2,), "nothing can find it any more"
    published.check_integrity(2)


def test_at_the_end_only_what_is_read_stays(published: PublishedWindows) -> None:
    published.add((1,), 5, A, 1)
    published.add((2,), 5, B, 0)
    assert published.forget_all() == [(2,)]
    assert published.open(A) is None
    assert published.close((1,)) == (1,)
    assert published.n_pages == 0


def test_a_reader_too_many_is_told(published: PublishedWindows) -> None:
    published.add((1,), 5, A, 1)
    with pytest.raises(RuntimeError, match="1 readers are counted, expected 2"):
        published.check_integrity(2)

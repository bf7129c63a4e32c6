"""Pages: their layout, to the byte, and the pool, where each has one owner and one way back."""

from __future__ import annotations

import mmap
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool

LARGE_V3 = PageLayout("large-v3", 32, 20, 64, 1500, 125, "bfloat16")
LAYOUT = PageLayout("pool", 2, 2, 4, 10, 5, "float32")


def make_pool(n_pages: int = 8) -> PagePool:
    return PagePool(LAYOUT, n_pages)


def test_memory_is_one_contiguous_page_aligned_block() -> None:
    pool = make_pool()
    assert pool.tensor.shape == (8, 2, 2, 5, 2, 4)
    assert pool.tensor.dtype is torch.float32
    assert pool.tensor.is_contiguous()
    assert pool.base_address % mmap.PAGESIZE == 0
    third, last = pool.addresses((3, 7))
    assert third == pool.tensor[3].data_ptr()
    assert pool.page_at(third) == 3
    for wrong in (third + 1, pool.base_address - LAYOUT.page_bytes, last * 2):
        with pytest.raises(ValueError, match="no page"):
            pool.page_at(wrong)
    with pytest.raises(ValueError, match="not all of the pages"):
        pool.addresses((0, 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_every_dtype_has_its_size(dtype: str) -> None:
    layout = PageLayout("pool", 1, 1, 8, 10, 10, dtype)
    pool = PagePool(layout, 2)
    assert pool.tensor.element_size() * pool.tensor[0].numel() == layout.page_bytes
    pool.tensor[1].fill_(1.5)
    assert bool((pool.tensor[1] == 1.5).all())


def test_allocation_prefers_neighbours() -> None:
    pool = make_pool()
    assert pool.allocate(2) == (0, 1)
    assert pool.allocate(3) == (2, 3, 4)
    pool.release((1,))
    assert pool.allocate(2) == (5, 6)  # not (1, 5): a run is there
    assert pool.allocate(2) == (1, 7)
    assert pool.n_free == 0
    assert pool.allocate(1) is None


def test_pages_come_back_once() -> None:
    pool = make_pool()
    pages = pool.allocate(5)
    assert pages is not None
    for wrong, why in (
        ((pages[0], pages[0]), "twice"),
        ((*pages, 5), "free, expected used"),
        ((99,), "not in"),
    ):
        with pytest.raises(RuntimeError, match=why):
            pool.release(wrong)
    assert (pool.n_free, pool.n_used, pool.n_quarantined) == (3, 5, 0), "nothing has changed"
    late, used = pages[:2], pages[2:]
    pool.quarantine(late)
    assert (pool.n_free, pool.n_used, pool.n_quarantined) == (3, 3, 2)
    for take_back in (pool.release, pool.quarantine):
        with pytest.raises(RuntimeError, match="quarantined, expected used"):
            take_back(late)
    with pytest.raises(RuntimeError, match="3 pages are in use"):
        pool.check_integrity()
    pool.check_integrity(n_used=3)
    pool.release(used)
    assert pool.allocate(7) is None
    pool.lift(late)
    with pytest.raises(RuntimeError, match="expected quarantined"):
        pool.lift(late)
    assert (pool.n_free, pool.n_used, pool.n_quarantined) == (8, 0, 0)
    pool.check_integrity()


def test_what_can_never_fit_is_refused() -> None:
    pool = make_pool()
    for n_pages in (0, 9):
        with pytest.raises(ValueError, match="cannot take"):
            pool.allocate(n_pages, timeout_s=60.0)
    with pytest.raises(ValueError, match="at least one"):
        make_pool(0)


def test_allocation_waits_for_a_release_and_gives_up_in_time() -> None:
    pool = make_pool()
    pages = pool.allocate(8)
    assert pages is not None
    begin = time.monotonic()
    assert pool.allocate(1, timeout_s=0.05) is None
    assert time.monotonic() - begin >= 0.05
    got: list[tuple[int, ...] | None] = []
    waiter = threading.Thread(target=lambda: got.append(pool.allocate(6, timeout_s=30.0)))
    waiter.start()
    pool.release(pages[:3])
    pool.quarantine(pages[3:6])
    assert not got
    pool.lift(pages[3:6])
    waiter.join(30.0)
    assert got == [(0, 1, 2, 3, 4, 5)]


def test_no_page_has_two_owners_among_threads() -> None:
    pool = make_pool(6)
    owners = [0] * 6

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(200):
            pages = pool.allocate(choose.randint(1, 4), timeout_s=30.0)
            assert pages is not None
            for page in pages:
                owners[page] += 1
                assert owners[page] == 1
            for page in pages:
                owners[page] -= 1
            if choose.random() < 0.3:
                pool.quarantine(pages)
                pool.lift(pages)
            else:
                pool.release(pages)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    pool.check_integrity()
    assert pool.n_free == 6


def test_pages_for_a_window_counts_the_partly_filled_last_one() -> None:
    for frames, n_pages in ((1, 1), (64, 1), (65, 2), (1500, 24)):
        assert replace(LARGE_V3, page_frames=64).pages_for(frames) == n_pages
    assert replace(LARGE_V3, page_frames=1500).pages_for(1500) == 1


def test_hash_differs_when_any_field_differs() -> None:
    other = {"model": "m", "dtype": "float16", "page_frames": 50, "payload": "encoder_states"}
    values = {f.name: other.get(f.name) or getattr(LARGE_V3, f.name) + 1 for f in fields(LARGE_V3)}
    changed = [replace(LARGE_V3, **{name: value}) for name, value in values.items()]
    assert len({LARGE_V3.hash, *(layout.hash for layout in changed)}) == 1 + len(changed)
    assert replace(LARGE_V3).hash == LARGE_V3.hash


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"page_frames": 0}, {"page_frames": 1501}])
def test_impossible_layouts_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        replace(LARGE_V3, **wrong)

"""Which windows go next, and when a batch is closed, on a clock of the test's own."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

from cluster.common.errors import OverloadedError
from cluster.common.fair_order import place_of
from cluster.common.messages import EncodeRequest, Priority
from cluster.common.priorities import PASSED_BY
from encoder_worker.batcher import Batcher, QueuedWindow


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_batcher(clock: Clock, max_batch: int = 4) -> Batcher:
    return Batcher(max_batch, batch_wait_s=0.005, clock=clock)


def put(
    batcher: Batcher,
    request_id: str,
    window: int = 0,
    n_samples: int = 100,
    remaining_s: float = 60.0,
    key: bytes = b"",
    fresh: bool = False,
    context: int = 0,
    priority: Priority = "interactive",
    owner: bytes = b"",
) -> QueuedWindow:
    priority, rank = place_of(window, priority, 0.0)
    request = EncodeRequest(
        request_id,
        window,
        0,
        np.zeros(n_samples, dtype=np.int16),
        remaining_s,
        fresh=fresh,
        context=context,
        priority=priority,
        owner=owner,
        rank=rank,
    )
    return batcher.put(request, Future(), key)


def names(windows: list[QueuedWindow]) -> list[str]:
    return [f"{w.request.request_id}{w.request.window}" for w in windows]


def test_after_a_batch_the_next_waits_to_fill_but_not_long(clock: Clock) -> None:
    batcher = make_batcher(clock)
    put(batcher, "a")
    batcher.pop(4)
    put(batcher, "b")
    assert batcher.ready_in_s() == pytest.approx(0.005)
    clock.now += 0.003
    put(batcher, "c")
    assert batcher.ready_in_s() == pytest.approx(0.002)
    clock.now += 0.0021
    assert batcher.ready_in_s() == 0.0
    assert names(batcher.pop(4)) == ["b0", "c0"]


def test_a_class_has_a_bound_of_its_own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_worker.batcher.MOST_QUEUED", 2)
    batcher = make_batcher(clock)
    for n in range(2):
        put(batcher, f"bulk{n}-", priority="bulk")
    with pytest.raises(OverloadedError):
        put(batcher, "bulk2-", priority="bulk")
    put(batcher, "clip")
    assert len(batcher) == 3


def test_of_duplicates_the_more_urgent_one_goes(clock: Clock) -> None:
    batcher = make_batcher(clock)
    put(batcher, "bulk", priority="bulk", key=b"k")
    put(batcher, "clip", key=b"k")
    assert names(batcher.pop(4)) == ["clip0"]


def test_expired_windows_come_out_once_and_are_never_popped(clock: Clock) -> None:
    batcher = make_batcher(clock)
    expired = put(batcher, "a", remaining_s=1.0, key=b"k")
    put(batcher, "b", remaining_s=9.0, key=b"k")
    clock.now += 1.0
    assert names(batcher.pop(4)) == ["b0"]
    assert batcher.expire() == [expired]
    assert batcher.expire() == []
    assert len(batcher) == 0


def test_wait_returns_on_a_window_a_wake_and_the_timeout() -> None:
    batcher = Batcher(4, batch_wait_s=0.005)
    assert batcher.wait(0.0) == 0
    for act, expected in ((lambda: put(batcher, "a"), 1), (batcher.wake, 0)):
        found: list[int] = []
        waiter = threading.Thread(target=lambda found=found: found.append(batcher.wait(30.0)))
        waiter.start()
        act()
        waiter.join(30.0)
        assert found == [expected]
        batcher.pop(4)


def test_many_threads_lose_and_double_nothing() -> None:
    batcher, taken = Batcher(8, batch_wait_s=0.0), list[QueuedWindow]()

    def produce(name: int) -> None:
        for window in range(50):
            put(batcher, str(name), window)

    with ThreadPoolExecutor(8) as producers:
        producing = producers.map(produce, range(8))
        while len(taken) < 8 * 50:
            assert batcher.wait(30.0)
            batch = batcher.pop(8)
            assert len(batch) <= 8
            batcher.finish(batch)
            taken += batch
        list(producing)
    assert len({id(window) for window in taken}) == 8 * 50
    assert batcher.n_in_flight == 0


def test_a_window_that_must_be_encoded_anew_waits_for_nobody(clock: Clock) -> None:
    batcher = make_batcher(clock)
    put(batcher, "a", key=b"k")
    fresh = put(batcher, "b", key=b"k", fresh=True)
    put(batcher, "c", key=b"k")
    taken = batcher.pop(4)
    assert names(taken) == ["a0", "b0"]
    batcher.finish([fresh])
    assert batcher.n_distinct == 0, "the other one is still in flight"
    batcher.finish(taken[:1])
    assert batcher.n_distinct == 1


def test_a_batch_holds_windows_of_one_context(clock: Clock) -> None:
    batcher = make_batcher(clock, max_batch=3)
    contexts = {"a": 320, "b": 384, "c": 320, "d": 0, "e": 384, "f": 320, "g": 320}
    for name, context in contexts.items():
        put(batcher, name, context=context)
        clock.now += 0.001
    assert batcher.has_full_batch
    assert batcher.work == pytest.approx(1 + (4 * 320 + 2 * 384) / 1500)
    first = batcher.pop(3)
    assert names(first) == ["a0", "c0", "f0"]
    assert not batcher.has_full_batch
    assert batcher.work == pytest.approx(1 + (4 * 320 + 2 * 384) / 1500)
    assert batcher.queued_work() == pytest.approx(1 + (320 + 2 * 384) / 1500)
    batcher.finish(first)
    assert [names(batcher.pop(3)) for _ in range(3)] == [["b0", "e0"], ["d0"], ["g0"]]


def test_live_windows_go_before_interactive_ones_and_these_before_bulk(clock: Clock) -> None:
    batcher = make_batcher(clock)
    put(batcher, "bulk", priority="bulk", remaining_s=2.0)
    put(batcher, "clip", remaining_s=2.0)
    clock.now += 1.9
    put(batcher, "live", priority="live", n_samples=480_000)
    assert names(batcher.pop(3)) == ["live0", "clip0", "bulk0"]


def test_no_class_starves_behind_more_urgent_ones(clock: Clock) -> None:
    """For every window that leaves a live one of another context comes, in a batch of its own."""
    batcher = make_batcher(clock, max_batch=2)
    for n in range(3):
        put(batcher, f"clip{n}-", remaining_s=600.0)
        put(batcher, f"bulk{n}-", remaining_s=600.0, priority="bulk")
    order = []
    for n in range(100):
        put(batcher, f"live{n}-", context=300, priority="live")
        clock.now += 0.1
        taken = batcher.pop(1)
        order += names(taken)
        batcher.finish(taken)
    clips = [order.index(f"clip{n}-0") for n in range(3)]
    bulk = [order.index(f"bulk{n}-0") for n in range(3)]
    assert clips[0] == PASSED_BY["interactive"]
    assert max(b - a for a, b in itertools.pairwise(clips)) <= PASSED_BY["interactive"] + 2
    assert bulk[0] <= PASSED_BY["bulk"] + 1
    assert max(b - a for a, b in itertools.pairwise(bulk)) <= PASSED_BY["bulk"] + 2


def test_whoever_comes_waits_for_one_bulk_window_at_most(clock: Clock) -> None:
    batcher = make_batcher(clock, max_batch=4)
    for n in range(20):
        put(batcher, f"bulk{n}-", priority="bulk")
    assert batcher.wait(0.0) == 1
    running = batcher.pop(4)
    assert names(running) == ["bulk0-0"]
    assert not batcher.has_full_batch
    assert batcher.pop(4) == []
    for n in range(3):
        put(batcher, f"clip{n}-")
    assert names(batcher.pop(4)) == ["clip0-0", "clip1-0", "clip2-0"]
    batcher.finish(running)
    put(batcher, "clip3-")
    assert names(batcher.pop(4)) == ["clip3-0", "bulk1-0"]


def test_as_many_bulk_windows_are_in_flight_as_were_asked_for(clock: Clock) -> None:
    batcher = Batcher(4, batch_wait_s=0.0, clock=clock, bulk_at_once=3)
    for n in range(5):
        put(batcher, f"bulk{n}-", priority="bulk")
    running = batcher.pop(4)
    assert names(running) == ["bulk0-0", "bulk1-0", "bulk2-0"]
    assert batcher.pop(4) == []
    batcher.finish(running[:1])
    assert names(batcher.pop(4)) == ["bulk3-0"]


def test_bulk_windows_that_are_held_wait_for_their_turn(clock: Clock) -> None:
    batcher = make_batcher(clock, max_batch=1)
    put(batcher, "bulk", priority="bulk")
    batcher.hold(["bulk"])
    assert batcher.ready_in_s() is None
    for n in range(PASSED_BY["bulk"]):
        put(batcher, f"clip{n}-")
        taken = batcher.pop(1)
        assert names(taken) == [f"clip{n}-0"]
        batcher.finish(taken)
    assert batcher.ready_in_s() == 0.0
    assert names(batcher.pop(1)) == ["bulk0"]

"""The one order of work: classes, owners, requests, deadlines, and that nothing starves."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from cluster.common.fair_order import LAST_RANK, OLDEST_EVERY, FairOrder, place_of
from cluster.common.messages import Priority


@dataclass(eq=False)
class Window:
    request: str
    number: int = 0
    priority: Priority = "interactive"
    owner: bytes = b""
    work: float = 1.0
    arrived_s: float = 0.0
    deadline_s: float = 600.0

    @property
    def rank(self) -> int:
        return place_of(self.number, self.priority, 0.0)[1]


def test_all_windows_of_a_long_request_are_later_ones() -> None:
    assert place_of(0, "interactive", 29.0) == ("interactive", 0)
    assert place_of(0, "interactive", 31.0) == ("later", 0)
    assert place_of(3, "interactive", 0.0) == ("later", 3), "its length was not known"
    assert place_of(20, "interactive", 600.0) == ("later", LAST_RANK)
    assert place_of(500, "live", 600.0) == ("live", 0)
    assert place_of(2, "bulk", 600.0) == ("bulk", 2)


def taken(order: FairOrder, waiting: list[Window], n: int) -> list[Window]:
    gone = []
    for _ in range(n):
        window = order.next(waiting)
        waiting.remove(window)
        order.went(window, {one.priority for one in waiting})
        gone.append(window)
    return gone


def test_the_first_windows_of_all_go_before_anybody_s_tail() -> None:
    """Eighteen files with eight windows each are there, and a clip comes last of all."""
    waiting = [Window(f"file{n}", number) for n in range(18) for number in range(9, 17)]
    waiting.append(Window("clip", arrived_s=1.0))
    assert taken(FairOrder(), waiting, 1)[0].request == "clip"
    waiting.append(Window("new", 0, arrived_s=2.0))
    waiting.append(Window("new", 1, arrived_s=2.0))
    assert [one.request for one in taken(FairOrder(), waiting, 2)] == ["new", "new"]


def test_the_tails_of_files_take_turns() -> None:
    order, number, clock_s = FairOrder(), Counter[str](), 0.0
    waiting = [Window(f"file{n}", LAST_RANK + 1) for n in range(3) for _ in range(8)]
    for _ in range(90):
        clock_s += 1.0
        (gone,) = taken(order, waiting, 1)
        number[gone.request] += 1
        waiting.append(
            Window(gone.request, gone.number + 8, arrived_s=clock_s, deadline_s=600.0 + clock_s)
        )
    assert max(number.values()) - min(number.values()) <= 8


def test_owners_share_by_work_and_not_by_how_much_they_send() -> None:
    order = FairOrder()
    waiting = [Window(f"a{n}", owner=b"a") for n in range(200)]
    waiting += [Window(f"b{n}", owner=b"b", work=0.5) for n in range(40)]
    work = Counter[bytes]()
    for window in taken(order, waiting, 28):
        work[window.owner] += window.work  # type: ignore[assignment]
    assert abs(work[b"a"] - work[b"b"]) <= 5  # one in eight goes by its age


def test_who_was_away_has_saved_nothing() -> None:
    order = FairOrder()
    alone = [Window(f"a{n}", owner=b"a") for n in range(100)]
    taken(order, alone, 90)
    waiting = [*alone, *(Window(f"b{n}", owner=b"b", arrived_s=9.0) for n in range(20))]
    owners = Counter(window.owner for window in taken(order, waiting, 10))
    assert owners[b"b"] <= 6


def test_of_windows_alike_the_nearest_deadline_goes_first() -> None:
    waiting = [Window("late", deadline_s=90.0), Window("soon", deadline_s=30.0)]
    assert [one.request for one in taken(FairOrder(), waiting, 2)] == ["soon", "late"]


def test_nothing_starves_behind_a_dense_stream_of_clips() -> None:
    order, waiting = FairOrder(), [Window("file", 20), Window("file", 21, arrived_s=0.5)]
    went = []
    for n in range(3 * OLDEST_EVERY):
        waiting.append(Window(f"clip{n}", arrived_s=1.0 + n))
        went += [one.request for one in taken(order, waiting, 1)]
    assert went.count("file") == 2
    assert went.index("file") < OLDEST_EVERY

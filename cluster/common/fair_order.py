"""Which of several waiting windows goes next: the one order of work, wherever windows wait.

By class first (`common.priorities`); then fair between owners, whoever of them was given less work;
then fair between requests: the first windows of one before the later windows of another, so that a
short file waits for no long one's tail; then by deadline. So that nothing starves, every
`OLDEST_EVERY`-th window of a class is the one that has waited longest. A router orders by it what
it sends, and an encoder what came from all routers. Knows neither; not thread-safe.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from cluster.common.messages import Priority
from cluster.common.priorities import Turns

LAST_RANK = 8  # windows of a request from this one on are all alike
OLDEST_EVERY = 8
MOST_OWNERS = 1024  # of whom it is known what they were given


class Waiting(Protocol):
    """A window that waits. Times are of one clock, work is that of `EncodeRequest.work`."""

    @property
    def priority(self) -> Priority: ...

    @property
    def owner(self) -> bytes:
        """Opaque: whose windows share one part of the workers."""

    @property
    def rank(self) -> int: ...

    @property
    def work(self) -> float: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def deadline_s(self) -> float: ...


W = TypeVar("W", bound=Waiting)


def rank_of(window: int, priority: Priority) -> int:
    """From a window's number within its request; that of a live session's update says nothing."""
    return 0 if priority == "live" else min(window, LAST_RANK)


class FairOrder:
    """Of one queue. Owners share by start-time fair queueing, each class by itself."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._given: dict[tuple[Priority, bytes], float] = {}  # virtual times
        self._now: dict[Priority, float] = {}  # of who was served last
        self._taken: dict[Priority, int] = {}

    def take(self, able: Iterable[W], classes_behind: Collection[Priority]) -> W:
        """The one whose turn it is, which counts as gone.

        Args:
            able: windows that may go now: at least one.
            classes_behind: of all windows that wait, whether they may go now or not.
        """
        by_class: dict[Priority, list[W]] = {}
        for window in able:
            by_class.setdefault(window.priority, []).append(window)
        priority = self.turns.next(by_class)
        some = by_class[priority]
        taken = self._taken[priority] = self._taken.get(priority, 0) + 1
        if taken % OLDEST_EVERY == 0:
            window = min(some, key=lambda one: one.arrived_s)
        else:
            window = min(some, key=lambda one: (self._tag(one), one.rank, one.deadline_s))
            self._now[priority] = self._tag(window)
        self._give(window)
        self.turns.went(priority, classes_behind)
        return window

    def _tag(self, window: Waiting) -> float:
        """The owner's virtual time: who had nothing here for a while begins with the others."""
        priority = window.priority
        return max(self._given.get((priority, window.owner), 0.0), self._now.get(priority, 0.0))

    def _give(self, window: Waiting) -> None:
        key = (window.priority, window.owner)
        self._given[key] = self._tag(window) + window.work
        if len(self._given) > MOST_OWNERS:
            self._given = {
                one: given for one, given in self._given.items() if given > self._now[one[0]]
            }

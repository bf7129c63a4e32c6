"""The one order of work, wherever windows wait.

First by class (`common.priorities`), then fair between owners by the work they were given, then
fair between requests (by rank: first windows before later ones), then by deadline. Every
`OLDEST_EVERY`-th window of a class is the one that has waited longest, so that nothing starves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from cluster.common.messages import WINDOW_S, Priority
from cluster.common.priorities import Turns

LAST_RANK = 8  # of all later windows of a request, too
OLDEST_EVERY = 8
MOST_OWNERS = 1024  # whose work is remembered


class Waiting(Protocol):
    """Times are of one clock; `owner` is opaque, `work` as in `EncodeRequest.work`."""

    @property
    def priority(self) -> Priority: ...

    @property
    def owner(self) -> bytes: ...

    @property
    def rank(self) -> int: ...

    @property
    def work(self) -> float: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def deadline_s(self) -> float: ...


W = TypeVar("W", bound=Waiting)


def place_of(window: int, priority: Priority, audio_s: float) -> tuple[Priority, int]:
    """Class and rank of a window, by its number and the audio known of its request."""
    if priority == "interactive" and (window or audio_s > WINDOW_S):
        priority = "later"
    return priority, 0 if priority == "live" else min(window, LAST_RANK)


class FairOrder:
    """The order of one queue: start-time fair queueing per class. Not thread-safe."""

    def __init__(self) -> None:
        self.turns = Turns()
        self._given: dict[tuple[Priority, bytes], float] = {}  # virtual times
        self._now: dict[Priority, float] = {}  # of the owner served last
        self._gone: dict[Priority, int] = {}

    def next(self, able: Iterable[W]) -> W:
        by_class: dict[Priority, list[W]] = {}
        for window in able:
            by_class.setdefault(window.priority, []).append(window)
        priority = self.turns.next(by_class)
        some = by_class[priority]
        if self._is_oldest_s_turn(priority):
            return min(some, key=lambda one: one.arrived_s)
        return min(some, key=lambda one: (self._tag(one), one.rank, one.deadline_s))

    def went(self, window: Waiting, behind: Collection[Priority]) -> None:
        """Note that a window goes while windows of the classes `behind` wait on."""
        priority, tag = window.priority, self._tag(window)
        if not self._is_oldest_s_turn(priority):
            self._now[priority] = tag
        self._gone[priority] = self._gone.get(priority, 0) + 1
        self._given[priority, window.owner] = tag + window.work
        if len(self._given) > MOST_OWNERS:
            self._given = {
                one: given for one, given in self._given.items() if given > self._now.get(one[0], 0)
            }
        self.turns.went(priority, behind)

    def _is_oldest_s_turn(self, priority: Priority) -> bool:
        return (self._gone.get(priority, 0) + 1) % OLDEST_EVERY == 0

    def _tag(self, window: Waiting) -> float:
        """The owner's virtual time; after a pause it starts level with the others."""
        priority = window.priority
        return max(self._given.get((priority, window.owner), 0.0), self._now.get(priority, 0.0))

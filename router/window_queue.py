"""The windows of this process that wait for one model's workers, before anything is sent.

A window's audio stays with its request until its turn comes in the one order of work
(`common.fair_order`) and the pools have room: so the order is decided where it can still be
changed, and no window waits in a queue that knows none. Room is a bound on this process's own work
in flight, of a window's class and more urgent ones, since workers let these pass: of the encoders
until the window is encoded, of the decoders from before that until its text is there, since KV that
no decoder has accepted does not last. Live windows do not wait, nor do windows whose KV is there
or being made. Where no worker is known one window is sent, which starts one.
"""

from __future__ import annotations

import asyncio
import bisect
import uuid
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cluster.common.clock import Clock
from cluster.common.fair_order import FairOrder
from cluster.common.messages import Priority, Role
from cluster.common.priorities import URGENCY
from router.pools import DecoderClient, EncoderClient, Room


@dataclass(slots=True, eq=False)
class Turn:
    """One window on its way through both pools; `common.fair_order.Waiting` while it waits."""

    priority: Priority
    owner: bytes  # who shares the workers
    rank: int
    work: float  # as of `EncodeRequest`
    rows: float  # hypotheses in a decoder
    kv_key: bytes = b""  # as of `Pool.has`
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    encoding: float = 0.0  # what it counts for in the encoders now
    decoding: float = 0.0  # and in the decoders
    granted: asyncio.Future[None] | None = None


class WindowQueue:
    def __init__(self, encoders: EncoderClient, decoders: DecoderClient, clock: Clock) -> None:
        self.sender = uuid.uuid4().hex  # names this queue to the workers
        self._encoders = encoders
        self._decoders = decoders
        self._clock = clock
        self._order = FairOrder()
        self._waiting: dict[tuple[Priority, bytes], list[Turn]] = {}  # by class and owner, in order
        self._came: dict[Priority, dict[Turn, None]] = {one: {} for one in URGENCY}  # in order
        self._work: Counter[Priority] = Counter()  # of those that wait
        self._encoding = dict.fromkeys(URGENCY, 0.0)  # in flight, by class
        self._decoding = dict.fromkeys(URGENCY, 0.0)
        self._full: set[Role] = set()  # why those that wait do

    @contextmanager
    def holding(self, turn: Turn) -> Iterator[None]:
        """What `wait` gives inside is held until the end."""
        try:
            yield
        finally:
            self.encoded(turn)
            self._decoding[turn.priority] -= turn.decoding
            turn.decoding = 0.0
            self._grant()

    async def wait(self, turn: Turn, remaining_s: float) -> float:
        """Wait until the window may be encoded. Returns the seconds that it took."""
        turn.arrived_s = self._clock.monotonic()
        turn.deadline_s = turn.arrived_s + remaining_s
        if turn.priority == "live" or (turn.kv_key and self._encoders.has(turn.kv_key)):
            self.skip(turn)
            return 0.0
        turn.granted = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((turn.priority, turn.owner), [])
        bisect.insort(waiting, turn, key=lambda one: (one.rank, one.deadline_s))
        self._came[turn.priority][turn] = None
        self._work[turn.priority] += turn.work  # type: ignore[assignment]
        self._grant()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn in self._came[turn.priority]:
                self._take_out(turn)
            raise
        return self._clock.monotonic() - turn.arrived_s

    def skip(self, turn: Turn) -> None:
        """Count at the decoders what needs no encode."""
        self._decoding[turn.priority] += turn.rows - turn.decoding
        turn.decoding = turn.rows

    def encoded(self, turn: Turn) -> None:
        """The encoders are done with it, whatever came of it; idempotent."""
        if turn.encoding:
            self._encoding[turn.priority] -= turn.encoding
            turn.encoding = 0.0
            self._grant()

    def backlog(self, role: Role, priority: Priority) -> float:
        """Windows of a class that wait for a pool, for each of its workers."""
        if role not in self._full:
            return 0.0
        pool = self._encoders if role == "encoder" else self._decoders
        return self._work[priority] / max(1, pool.room().workers)

    def _grant(self) -> None:
        encoders, decoders = self._encoders.room(), self._decoders.room()
        while classes := {one for one, came in self._came.items() if came}:
            may_encode = {one for one in classes if _fits(one, self._encoding, encoders)}
            may_decode = {one for one in classes if _fits(one, self._decoding, decoders)}
            self._full = {"encoder"} if classes - may_encode else set()
            self._full |= {"decoder"} if classes - may_decode else set()
            able = [one for one in self._firsts(may_encode) if one.priority in may_decode]
            if not able:  # but those that have their room at a decoder
                able = [one for name in may_encode for one in self._came[name] if one.decoding]
            if not able:
                return
            turn = self._order.next(able)
            self._let_go(turn)
            self._order.went(turn, {one for one, came in self._came.items() if came})
            turn.encoding = turn.work
            self._encoding[turn.priority] += turn.work
            if turn.kv_key:  # whoever has the same audio needs no encode of its own
                same = [one for came in self._came.values() for one in came]
                for duplicate in (one for one in same if one.kv_key == turn.kv_key):
                    self._let_go(duplicate)

    def _firsts(self, classes: Collection[Priority]) -> Iterator[Turn]:
        """Whoever may be next: of each owner the first in order, and of each class the oldest."""
        for (priority, _), waiting in self._waiting.items():
            if priority in classes:
                yield waiting[0]
        for priority in classes:
            yield next(iter(self._came[priority]))

    def _let_go(self, turn: Turn) -> None:
        self._take_out(turn)
        self.skip(turn)
        assert turn.granted is not None
        if not turn.granted.done():
            turn.granted.set_result(None)

    def _take_out(self, turn: Turn) -> None:
        waiting = self._waiting[turn.priority, turn.owner]
        waiting.remove(turn)
        if not waiting:
            del self._waiting[turn.priority, turn.owner]
        del self._came[turn.priority][turn]
        self._work[turn.priority] -= turn.work  # type: ignore[assignment]


def _fits(priority: Priority, taken: dict[Priority, float], room: Room) -> bool:
    """Whether one more may go: one always may where nothing is there, but what rounding left."""
    in_its_way = sum(work for one, work in taken.items() if URGENCY[one] <= URGENCY[priority])
    return in_its_way < max(room.total, 1e-6)

"""The queue of this process's windows that wait for one model's workers.

Windows are sent in the order of `common.fair_order` once both pools have room for them: a limit on
this process's work in flight of the same and more urgent classes. A window takes room at the
decoders before it is encoded, since KV that no decoder has accepted does not last. Live windows do
not wait, nor do windows whose KV exists or is being computed.
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
    """One window's place in both pools. Implements `common.fair_order.Waiting`."""

    priority: Priority
    owner: bytes  # the unit of fair sharing
    rank: int
    work: float  # see `EncodeRequest`
    rows: float  # hypotheses in a decoder
    kv_key: bytes = b""  # see `Pool.has`
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    encoding: float = 0.0  # its work at the encoders now
    decoding: float = 0.0  # its rows at the decoders now
    granted: asyncio.Future[None] | None = None


class WindowQueue:
    def __init__(self, encoders: EncoderClient, decoders: DecoderClient, clock: Clock) -> None:
        self.sender = uuid.uuid4().hex  # names this queue to the workers
        self._encoders = encoders
        self._decoders = decoders
        self._clock = clock
        self._order = FairOrder()
        self._waiting: dict[tuple[Priority, bytes], list[Turn]] = {}  # by class and owner, in order
        self._came: dict[Priority, dict[Turn, None]] = {one: {} for one in URGENCY}  # by age
        self._work: Counter[Priority] = Counter()  # of waiting windows
        self._encoding = dict.fromkeys(URGENCY, 0.0)  # in flight, by class
        self._decoding = dict.fromkeys(URGENCY, 0.0)
        self._full: set[Role] = set()  # pools without room for waiting windows

    @contextmanager
    def holding(self, turn: Turn) -> Iterator[None]:
        """Keep the room that `wait` or `skip` takes until the end of the block."""
        try:
            yield
        finally:
            self.encoded(turn)
            self._decoding[turn.priority] -= turn.decoding
            turn.decoding = 0.0
            self._grant()

    async def wait(self, turn: Turn, remaining_s: float) -> float:
        """Wait until the window may be encoded. Returns the seconds waited."""
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
        """Take room at the decoders for a window that needs no encode."""
        self._decoding[turn.priority] += turn.rows - turn.decoding
        turn.decoding = turn.rows

    def encoded(self, turn: Turn) -> None:
        """Free the window's room at the encoders. Idempotent."""
        if turn.encoding:
            self._encoding[turn.priority] -= turn.encoding
            turn.encoding = 0.0
            self._grant()

    def backlog(self, role: Role, priority: Priority) -> float:
        """Work of a class that waits for a pool, for each of its workers."""
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
            if not able:  # then windows that already have room at a decoder
                able = [one for name in may_encode for one in self._came[name] if one.decoding]
            if not able:
                return
            turn = self._order.next(able)
            self._let_go(turn)
            self._order.went(turn, {one for one, came in self._came.items() if came})
            turn.encoding = turn.work
            self._encoding[turn.priority] += turn.work
            if turn.kv_key:  # windows of the same audio need no encode of their own
                same = [one for came in self._came.values() for one in came]
                for duplicate in (one for one in same if one.kv_key == turn.kv_key):
                    self._let_go(duplicate)

    def _firsts(self, classes: Collection[Priority]) -> Iterator[Turn]:
        """The first window of each owner, and the oldest of each class."""
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
    """Whether one more may go. One may if none is in flight, up to rounding."""
    in_its_way = sum(work for one, work in taken.items() if URGENCY[one] <= URGENCY[priority])
    return in_its_way < max(room.total, 1e-6)

"""Admits sequences, chooses those that run, and owns the pages and slots that they hold.

At admission (in the order of `cluster.common.fair_order`) a sequence gets its cross-attention and
landing pages. It gets all its rows, each with a slot and self-attention pages for the longest text,
when it begins to run, so a running sequence is never preempted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Mapping, Sequence

from cluster.common.fair_order import FairOrder
from cluster.common.kv.pool import PagePool
from cluster.common.messages import Priority
from cluster.common.priorities import PASSED_BY, SHARES, URGENCY, Turns, leaves_room
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence, SequenceState

TOKENS_AT_ONCE = 512  # of prompts, or known texts, in one step, so that long ones stall no batch
READ_AHEAD = 0.5  # of the batch: sequences whose KV may be read before there are rows for them


# Steps of a CPU take longer with each row, so live ones go first there; on a GPU, where more rows
# cost next to nothing, only bulk ones wait.
ALONE = URGENCY
STEPS: Mapping[Priority, int] = dict.fromkeys(PASSED_BY, 32)  # steps of others before one
TOGETHER: Mapping[Priority, int] = {"live": 0, "interactive": 0, "later": 0, "bulk": 1}


class Scheduler:
    """One worker's queues, for the engine's thread. self_pages: pages of a row in `self_pool`."""

    def __init__(
        self,
        cross_pool: PagePool,
        self_pool: PagePool,
        self_pages: int,
        max_batch: int,
        landing_pool: PagePool | None = None,
        step_order: Mapping[Priority, int] = TOGETHER,
    ) -> None:
        """landing_pool: takes encoder states; None if KV itself travels.

        step_order: classes with a lower number step first; those with equal ones step together.
        """
        self._step_order = step_order
        self._passed_by = STEPS if step_order is ALONE else PASSED_BY
        self._cross_pool = cross_pool
        self._self_pool = self_pool
        self._landing_pool = landing_pool
        self._self_pages = self_pages
        self._n_foreign = self_pool.n_used
        self._max_batch = max_batch
        self._read_ahead = max(1, round(READ_AHEAD * max_batch))
        self._free_slots = list(range(max_batch - 1, -1, -1))  # the lowest is taken first
        self._page_order, self._row_order = FairOrder(), FairOrder()
        self._step_turns = Turns(self._passed_by)
        self._waiting: dict[Priority, list[DecodeSequence]] = {one: [] for one in URGENCY}
        self._loading: dict[DecodeSequence, None] = {}  # in order of admission
        self._running: dict[DecodeSequence, None] = {}  # in order of their first step
        self._n_in_order = dict.fromkeys(step_order.values(), 0)  # that load or run
        self._none_late_before = math.inf  # a lower bound of all deadlines

    @property
    def is_mixed(self) -> bool:
        """Whether sequences load or run of which some may have to wait for others."""
        return sum(n > 0 for n in self._n_in_order.values()) > 1

    def classes(self) -> set[Priority]:
        return {sequence.priority for sequence in (*self._loading, *self._running)}

    @property
    def n_bulk(self) -> int:
        return self._n_in_order[self._step_order["bulk"]]

    @property
    def n_bulk_waiting(self) -> int:
        return len(self._waiting["bulk"])

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def n_loading(self) -> int:
        return len(self._loading)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_free_slots(self) -> int:
        """Free slots that no sequence with pages is about to take."""
        return max(0, len(self._free_slots) - sum(self._rows_wanted()))

    @property
    def n_without_slots(self) -> int:
        """Sequences with pages that wait for others' rows. For any thread."""
        return self._n_without_slots(URGENCY)

    def _n_without_slots(self, classes: Container[Priority]) -> int:
        left, n = len(self._free_slots), 0
        for wanted in self._rows_wanted(classes):
            left -= wanted
            n += left < 0
        return n

    def _rows_wanted(self, classes: Container[Priority] = URGENCY) -> list[int]:
        """Rows wanted by each sequence with pages and no rows, in order of admission."""
        loading = [s for s in tuple(self._loading) if not s.rows]
        return [s.options.n_rows for s in loading if s.priority in classes]

    def add(self, sequence: DecodeSequence) -> None:
        self._waiting[sequence.priority].append(sequence)
        self._none_late_before = min(self._none_late_before, sequence.deadline_s)

    def admit(self) -> list[DecodeSequence]:
        """Move waiting sequences to LOADING in order, while there is room.

        Beyond the free rows at most `READ_AHEAD` of the batch loads, less urgent classes not
        counted.
        """
        admitted = []
        while (sequence := self._next_waiting()) is not None and self._reserve(sequence):
            self._waiting[sequence.priority].remove(sequence)
            self._page_order.went(sequence, self._classes_waiting())
            sequence.state = SequenceState.LOADING
            self._loading[sequence] = None
            self._n_in_order[self._step_order[sequence.priority]] += 1
            admitted.append(sequence)
        return admitted

    def _classes_waiting(self) -> list[Priority]:
        return [priority for priority, waiting in self._waiting.items() if waiting]

    def _next_waiting(self) -> DecodeSequence | None:
        classes = [one for one in self._classes_waiting() if self._may_load(one)]
        able = [sequence for one in classes for sequence in self._waiting[one]]
        return self._page_order.next(able) if able else None

    def _may_load(self, priority: Priority) -> bool:
        as_urgent = [one for one, rank in URGENCY.items() if rank <= URGENCY[priority]]
        if self._n_without_slots(as_urgent) >= self._read_ahead:
            return False
        if priority not in SHARES or self._page_order.turns.is_due(priority):
            return True
        pool, n_pages = self._cross_pool, self._n_cross_pages(self._waiting[priority][0])
        return leaves_room(pool.n_used, n_pages, pool.n_pages, SHARES[priority])

    def _reserve(self, sequence: DecodeSequence) -> bool:
        cross = self._cross_pool.allocate(self._n_cross_pages(sequence))
        if cross is None:
            return False
        if (landing := self._landing_pool) is not None:
            landed = landing.allocate(landing.layout.pages_per_window)
            if landed is None:
                self._cross_pool.release(cross)
                return False
            sequence.landing_pages = landed
        sequence.cross_pages = cross
        return True

    def _n_cross_pages(self, sequence: DecodeSequence) -> int:
        """Pages that its KV has at the encoder, or that its projected states will take."""
        if self._landing_pool is None:
            return len(sequence.request.handle.addresses)
        return self._cross_pool.layout.pages_for(sequence.n_positions)

    def _new_row(self, candidate: int) -> Row:
        own = self._self_pool.allocate(self._self_pages)
        assert own is not None  # the self pool has room for every slot
        return Row(self._free_slots.pop(), own, candidate)

    def start_running(self) -> list[DecodeSequence]:
        """Move sequences with complete KV to RUNNING, up to a budget of prompt tokens.

        Only classes of the next step start. Sequences that begin again have kept their rows, and go
        first. The others go in order: if one needs more rows than are free, those behind it wait,
        so that small ones cannot starve it.
        """
        started: list[DecodeSequence] = []
        n_tokens = 0
        able = [s for s in self._running if s.can_step] if self.is_mixed else []
        classes = self._stepping(able)
        while (sequence := self._next_ready(classes)) is not None:
            options = sequence.options
            n_tokens += len(options.prompt_tokens) + len(options.prefix_tokens) + 1
            if started and n_tokens > TOKENS_AT_ONCE:
                break
            del self._loading[sequence]
            if not sequence.rows:
                sequence.rows = [self._new_row(candidate) for candidate in range(options.n_rows)]
                self._row_order.went(sequence, {one.priority for one in self._ready()})
            sequence.state = SequenceState.RUNNING
            self._running[sequence] = None
            started.append(sequence)
        return started

    def _ready(self) -> list[DecodeSequence]:
        """Sequences whose KV is complete, in order of admission."""
        return [s for s in self._loading if s.fetched is not None and not s.landing_pages]

    def _next_ready(self, stepping: Collection[Priority]) -> DecodeSequence | None:
        """The next sequence of these classes to run, if there are rows for it."""
        ready = [sequence for sequence in self._ready() if sequence.priority in stepping]
        if begun := next((sequence for sequence in ready if sequence.rows), None):
            return begun
        if not (able := [sequence for sequence in ready if self._may_run(sequence)]):
            return None
        sequence = self._row_order.next(able)
        return sequence if sequence.options.n_rows <= len(self._free_slots) else None

    def _may_run(self, sequence: DecodeSequence) -> bool:
        """Whether it may take rows: less urgent classes leave some free."""
        priority, wanted = sequence.priority, sequence.options.n_rows
        if priority not in SHARES or self._row_order.turns.is_due(priority):
            return True
        n_used = self._max_batch - len(self._free_slots)
        return leaves_room(n_used, wanted, self._max_batch, SHARES[priority])

    def next_step(self) -> list[DecodeSequence]:
        """The sequences of the next step. Others keep their rows, and join in now and then."""
        able = [s for s in self._running if s.can_step]
        if not self.is_mixed:
            self._step_turns = Turns(self._passed_by)
            return able
        stepping = self._stepping(able)
        waiting = {s.priority for s in (*able, *self._ready())} - stepping
        self._step_turns.went(max(stepping, key=URGENCY.__getitem__), waiting)
        return [s for s in able if s.priority in stepping]

    def _stepping(self, able: Sequence[DecodeSequence]) -> set[Priority]:
        """The classes of the next step: down to the most urgent of `able`, or to a due one."""
        order = self._step_order
        first = min((order[s.priority] for s in able), default=len(order))
        due = [order[one] for one in order if self._step_turns.is_due(one)]
        last = max([first, *due])
        return {one for one in order if order[one] <= last}

    def repeat(self, sequence: DecodeSequence) -> None:
        """Have a running sequence begin again: `start_running` will return it once more."""
        del self._running[sequence]
        self._loading[sequence] = None

    def release(self, sequence: DecodeSequence) -> None:
        """Remove a sequence and all it holds; idempotent. Only with no READ or launch in flight."""
        assert not sequence.reading
        assert not sequence.n_in_flight
        if sequence.state is SequenceState.WAITING:
            self._waiting[sequence.priority].remove(sequence)
        if sequence in self._loading or sequence in self._running:
            self._n_in_order[self._step_order[sequence.priority]] -= 1
        self._loading.pop(sequence, None)
        self._running.pop(sequence, None)
        if sequence.cross_pages:
            self._cross_pool.release(sequence.cross_pages)
        self.release_landing(sequence)
        self.release_rows(sequence)
        sequence.cross_pages = ()
        sequence.state = SequenceState.FINISHED

    def release_rows(self, sequence: DecodeSequence) -> None:
        """Release its slots and their pages, which no later launch may use; idempotent."""
        for row in sequence.rows:
            self._self_pool.release(row.self_pages)
            self._free_slots.append(row.slot)
        self._free_slots.sort(reverse=True)
        sequence.rows = []

    def release_landing(self, sequence: DecodeSequence) -> None:
        if self._landing_pool is not None and sequence.landing_pages:
            self._landing_pool.release(sequence.landing_pages)
        sequence.landing_pages = ()

    def expired(self, now: float) -> list[DecodeSequence]:
        """Unanswered sequences past their deadline, in any state."""
        if now < self._none_late_before:
            return []
        unanswered = self._unanswered()
        self._none_late_before = min((s.deadline_s for s in unanswered), default=math.inf)
        return [s for s in unanswered if s.deadline_s <= now]

    def next_deadline(self) -> float:
        """The earliest deadline of unanswered sequences; infinite if there are none."""
        return min((s.deadline_s for s in self._unanswered()), default=math.inf)

    def _unanswered(self) -> list[DecodeSequence]:
        """Without answered sequences: the end of their READ or forward wakes the loop itself."""
        return [s for s in self.everything() if not s.resolved]

    def everything(self) -> list[DecodeSequence]:
        waiting = [sequence for of_class in self._waiting.values() for sequence in of_class]
        return [*waiting, *self._loading, *self._running]

    def is_idle(self) -> bool:
        return not (self.n_waiting or self._loading or self._running)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless idle, with every page and slot back (or quarantined)."""
        if not self.is_idle():
            raise RuntimeError(
                f"not idle: {self.n_waiting} waiting, {self.n_loading} loading, "
                f"{self.n_running} running"
            )
        if len(self._free_slots) != self._max_batch:
            raise RuntimeError(f"{len(self._free_slots)} of {self._max_batch} slots are free")
        self._cross_pool.check_integrity()
        self._self_pool.check_integrity(self._n_foreign)
        if self._landing_pool is not None:
            self._landing_pool.check_integrity()

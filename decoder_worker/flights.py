"""Forwards that were launched and whose results the host has not taken yet, oldest first.

With `depth` 1 a decode step's results are read while the next one runs: a sequence that they end is
in that next one for nothing, and what it gives there is dropped. With depth 0 every launch is
collected at once. All the loop's launches come through here, so that one place knows which pages a
kernel may still write to (`DecodeSequence.n_in_flight`), and what becomes of a batch that raised:
each of its sequences runs again alone, from what the host knows, and only culprits fail. A device
that is lost is no sequence's fault: it ends the loop, and with it the replica.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from decoder_worker.launched import Launched
from decoder_worker.model_runner import DeviceLostError, ModelRunner
from decoder_worker.sampling.search import Search, StepOutput
from decoder_worker.sequence import DecodeSequence
from decoder_worker.stats import Counters

logger = logging.getLogger(__name__)


class Kind(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class _Flight:
    """searches: the attempts that the sequences were in."""

    kind: Kind
    launched: Launched
    searches: tuple[Search | None, ...]

    def pairs(self) -> list[tuple[DecodeSequence, Search | None]]:
        return list(zip(self.launched.sequences, self.searches, strict=True))


class Flights:
    """Launches and collects. For the loop's thread.

    take: gets a sequence's outputs. fail: told of one whose forward raised though it ran alone.
    let_go: told of one that has its answer, once nothing of it is in flight.
    """

    def __init__(
        self,
        runner: ModelRunner,
        depth: int,
        counters: Counters,
        take: Callable[[Kind, DecodeSequence, list[StepOutput]], None],
        fail: Callable[[DecodeSequence, Exception], None],
        let_go: Callable[[DecodeSequence], None],
    ) -> None:
        self._runner = runner
        self._depth = depth
        self._counters = counters
        self._take = take
        self._fail = fail
        self._let_go = let_go
        self._flights: deque[_Flight] = deque()

    def launch(self, kind: Kind, sequences: Sequence[DecodeSequence]) -> None:
        """Launch a forward of sequences of which each may step; at depth 0 collect it as well."""
        if not sequences:
            return
        begun = time.monotonic()
        try:
            launched = self._run(kind, sequences)
        except Exception:
            logger.exception("a batch of %d raised: running each alone", len(sequences))
            self.collect()  # what was launched before it stands
            self._each_alone(sequences)
            return
        self._flights.append(_Flight(kind, launched, tuple(s.search for s in launched.sequences)))
        for sequence in launched.sequences:
            sequence.n_in_flight += 1
            sequence.n_ahead += 1
        self._count(kind, begun)
        if not self._depth:
            self.collect()

    def collect_all_but_last(self) -> None:
        """Take results, but for `depth` launches that no search has to decide about first."""
        last = self._flights[-1].searches if self._flights else ()
        ahead = all(search is not None and search.runs_ahead for search in last)
        self.collect(self._depth if ahead else 0)

    def collect(self, keep: int = 0) -> None:
        """Take the results of all but the `keep` last launches, in order."""
        while len(self._flights) > keep:
            flight = self._flights.popleft()
            begun = time.monotonic()
            try:
                outputs = self._runner.collect(flight.launched)
            except Exception:
                logger.exception("a batch of %d raised: running each alone", len(flight.searches))
                self._run_again(flight)
                return
            self._count(flight.kind, begun)
            self._counters.steps += flight.kind is Kind.DECODE
            self._land(flight)
            for (sequence, search), rows in zip(flight.pairs(), outputs, strict=True):
                if sequence.search is search and not sequence.resolved:
                    self._take(flight.kind, sequence, rows)
                self._let_go_if_done(sequence)

    def abandon(self) -> None:
        """Wait for all that was launched, and take none of it."""
        while self._flights:
            flight = self._flights.popleft()
            try:
                self._runner.collect(flight.launched)
            except Exception:
                logger.exception("a batch of %d was given up", len(flight.searches))
            self._land(flight)

    def _run(self, kind: Kind, sequences: Sequence[DecodeSequence]) -> Launched:
        run = self._runner.prefill if kind is Kind.PREFILL else self._runner.decode
        return run(sequences)

    def _land(self, flight: _Flight) -> None:
        for sequence, search in flight.pairs():
            sequence.n_in_flight -= 1
            if sequence.search is search:
                sequence.n_ahead -= 1

    def _run_again(self, flight: _Flight) -> None:
        """What came after a forward that failed was fed by it: all of it counts for nothing."""
        sequences = dict.fromkeys(flight.launched.sequences)
        for later in self._flights:
            sequences |= dict.fromkeys(later.launched.sequences)
        self._land(flight)
        self.abandon()
        self._each_alone(list(sequences))

    def _each_alone(self, sequences: Sequence[DecodeSequence]) -> None:
        for sequence in sequences:
            if not sequence.can_step:
                self._let_go_if_done(sequence)
                continue
            begins = not any(row.tokens for row in sequence.live)
            kind = Kind.PREFILL if begins else Kind.DECODE
            try:
                self._runner.restore(sequence)
                outputs = self._runner.collect(self._run(kind, [sequence]))[0]
            except DeviceLostError:
                raise
            except Exception as error:
                self._fail(sequence, error)
            else:
                self._take(kind, sequence, outputs)

    def _let_go_if_done(self, sequence: DecodeSequence) -> None:
        if sequence.resolved and not sequence.n_in_flight:
            self._let_go(sequence)

    def _count(self, kind: Kind, begun: float) -> None:
        seconds = time.monotonic() - begun
        if kind is Kind.PREFILL:
            self._counters.prefill_s += seconds
        else:
            self._counters.step_s += seconds

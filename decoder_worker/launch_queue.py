"""Forwards that were launched and whose results the host has not taken yet, oldest first.

With `depth` 1 a decode step's results are read while the next one runs. All launches go through
this queue, so `DecodeSequence.n_in_flight` tells which pages a kernel may still write to. After a
batch failed, each of its sequences runs again alone, and only those that fail again are failed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from cluster.common.failed_batches import DeviceLostError, run_alone
from decoder_worker.model_runner import ModelRunner
from decoder_worker.sampling.search import Search, StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.stats import Counters
from decoder_worker.step import Launched

logger = logging.getLogger(__name__)


class Kind(Enum):
    LANGUAGE = "language"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class _InFlight:
    kind: Kind
    launched: Launched
    searches: tuple[Search | None, ...]

    def leave(self) -> None:
        """Note that no kernel of this launch writes any more."""
        for sequence, search in zip(self.launched.sequences, self.searches, strict=True):
            sequence.n_in_flight -= 1
            if sequence.search is search:
                sequence.n_ahead -= 1


class LaunchQueue:
    """Launches forwards and collects their results. For the loop's thread.

    take: gets a sequence's outputs. fail: gets a sequence whose forward failed alone, or whose
    outputs could not be taken. retire: gets an answered sequence once nothing of it is in flight.
    """

    def __init__(
        self,
        runner: ModelRunner,
        depth: int,
        counters: Counters,
        take: Callable[[Kind, DecodeSequence, list[StepOutput]], None],
        fail: Callable[[DecodeSequence, Exception], None],
        retire: Callable[[DecodeSequence], None],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._depth = depth
        self._counters = counters
        self._take = take
        self._fail = fail
        self._retire = retire
        self._clock = clock
        self._in_flight: deque[_InFlight] = deque()

    def launch(self, kind: Kind, sequences: Sequence[DecodeSequence]) -> None:
        """Launch sequences that can step or lack their language; at depth 0 collect them too."""
        if not sequences:
            return
        begun = self._clock()
        try:
            launched = self._run(kind, sequences)
        except Exception as error:
            self.collect()  # earlier launches remain valid
            self._run_each_alone(sequences, error)
            return
        self._in_flight.append(
            _InFlight(kind, launched, tuple([s.search for s in launched.sequences]))
        )
        for sequence in launched.sequences:
            sequence.n_in_flight += 1
            sequence.n_ahead += 1
        self._count(kind, begun)
        if not self._depth:
            self.collect()

    def decode(self, sequences: Sequence[DecodeSequence], *, uninterrupted: bool) -> None:
        """Launch a decode step, and take the results of all but `depth` launches.

        None is left in flight if a search has to decide first. uninterrupted: nothing else is due
        between steps, so several may run at once.
        """
        may_run_several = uninterrupted and not (self._depth or self._in_flight)
        if may_run_several and (most := self._runner.most_steps(sequences)) > 1:
            self._run_several(sequences, most)
            return
        self.launch(Kind.DECODE, sequences)
        last = self._in_flight[-1].searches if self._in_flight else ()
        runs_ahead = all(search is not None and search.runs_ahead for search in last)
        self.collect(self._depth if runs_ahead else 0)

    def _run_several(self, sequences: Sequence[DecodeSequence], most: int) -> None:
        begun = self._clock()
        try:
            steps = self._runner.decode_several(sequences, most)
        except Exception as error:
            self._run_each_alone(sequences, error)
            return
        self._count(Kind.DECODE, begun)
        self._counters.steps += len(steps)
        searches = tuple(sequence.search for sequence in sequences)
        for outputs in steps:
            self._take_all(Kind.DECODE, sequences, searches, outputs)

    def collect(self, keep: int = 0) -> None:
        """Take the results of all but the `keep` last launches, in order."""
        while len(self._in_flight) > keep:
            oldest = self._in_flight.popleft()
            begun = self._clock()
            try:
                outputs = self._runner.collect(oldest.launched)
            except Exception as error:
                self._run_again(oldest, error)
                return
            self._count(oldest.kind, begun)
            self._counters.steps += oldest.kind is Kind.DECODE
            oldest.leave()
            self._take_all(oldest.kind, oldest.launched.sequences, oldest.searches, outputs)

    def _take_all(
        self,
        kind: Kind,
        sequences: Sequence[DecodeSequence],
        searches: Sequence[Search | None],
        outputs: Sequence[list[StepOutput]],
    ) -> None:
        for sequence, search, rows in zip(sequences, searches, outputs, strict=True):
            if sequence.search is search and not sequence.resolved:
                self._take_or_fail(kind, sequence, rows)
            if sequence.resolved:
                self._retire_if_done(sequence)

    def _take_or_fail(self, kind: Kind, sequence: DecodeSequence, rows: list[StepOutput]) -> None:
        try:
            self._take(kind, sequence, rows)
        except DeviceLostError:
            raise
        except Exception as error:
            self._fail(sequence, error)

    def abandon(self) -> None:
        """Wait for all launches and drop their results."""
        while self._in_flight:
            oldest = self._in_flight.popleft()
            try:
                self._runner.collect(oldest.launched)
            except Exception:
                logger.exception("a batch of %d was given up", len(oldest.searches))
            oldest.leave()

    def _run(self, kind: Kind, sequences: Sequence[DecodeSequence]) -> Launched:
        if kind is Kind.LANGUAGE:
            return self._runner.detect_language(sequences)
        run = self._runner.prefill if kind is Kind.PREFILL else self._runner.decode
        return run(sequences)

    def _run_again(self, failed: _InFlight, error: Exception) -> None:
        """Rerun a failed forward and all later ones, which it has fed."""
        sequences = dict.fromkeys(failed.launched.sequences)
        for later in self._in_flight:
            sequences |= dict.fromkeys(later.launched.sequences)
        failed.leave()
        self.abandon()
        self._run_each_alone(list(sequences), error)

    def _run_each_alone(self, sequences: Sequence[DecodeSequence], error: Exception) -> None:
        for sequence in sequences:
            if not (sequence.can_step or sequence.lacks_language):
                self._retire_if_done(sequence)
        steppable = [s for s in sequences if s.can_step or s.lacks_language]
        for sequence, (kind, outputs) in run_alone(error, steppable, self._step_alone, self._fail):
            self._take_or_fail(kind, sequence, outputs)

    def _step_alone(self, sequence: DecodeSequence) -> tuple[Kind, list[StepOutput]]:
        if sequence.lacks_language:
            return Kind.LANGUAGE, self._runner.collect(self._run(Kind.LANGUAGE, [sequence]))[0]
        begins = not any(row.tokens for row in sequence.live)
        kind = Kind.PREFILL if begins else Kind.DECODE
        self._runner.restore(sequence)
        return kind, self._runner.collect(self._run(kind, [sequence]))[0]

    def _retire_if_done(self, sequence: DecodeSequence) -> None:
        if sequence.resolved and not sequence.n_in_flight:
            self._retire(sequence)

    def _count(self, kind: Kind, begun: float) -> None:
        seconds = self._clock() - begun
        if kind is Kind.DECODE:
            self._counters.step_s += seconds
        else:
            self._counters.prefill_s += seconds

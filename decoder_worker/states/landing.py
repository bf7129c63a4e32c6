"""Sequences whose encoder states have landed, until their KV lies in their own pages.

The states of all that have arrived are projected together, beside the decode steps, and a sequence
begins to run once the device is done with its KV. Until then kernels may write to its pages, so it
counts as in flight. For the loop's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from cluster.batches import run_batch
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.states.projection import Projected, StatesProjection


class Landing:
    """Launches projections and sees them to their end.

    release: takes back the pages that a sequence's states landed in. fail: gets one whose
    projection raised though it ran alone. retire: gets one that has its answer already.
    """

    def __init__(
        self,
        projection: StatesProjection,
        release: Callable[[DecodeSequence], None],
        fail: Callable[[DecodeSequence, Exception], None],
        retire: Callable[[DecodeSequence], None],
    ) -> None:
        self._projection = projection
        self._release = release
        self._fail = fail
        self._retire = retire
        self._arrived: list[DecodeSequence] = []
        self._in_flight: deque[tuple[DecodeSequence, Projected]] = deque()

    def __len__(self) -> int:
        """Sequences whose projection was launched and not seen to its end."""
        return len(self._in_flight)

    def add(self, sequence: DecodeSequence) -> None:
        """Its READ has ended well."""
        self._arrived.append(sequence)

    def step(self) -> None:
        """Launch what has arrived, and settle what the device is done with."""
        arrived = [s for s in self._arrived if s.landing_pages and not s.resolved]
        self._arrived = []
        for sequence, projected in run_batch(arrived, self._projection.project, self._fail):
            sequence.n_in_flight += 1
            self._in_flight.append((sequence, projected))
        while self._in_flight and self._in_flight[0][1].is_done():
            self._settle()

    def wait(self) -> None:
        """Wait for the oldest projection in flight, where there is one."""
        if self._in_flight:
            self._in_flight[0][1].wait()
            self._settle()

    def finish(self) -> None:
        """Wait for all."""
        while self._in_flight:
            self.wait()

    def _settle(self) -> None:
        sequence, projected = self._in_flight.popleft()
        self._projection.note(projected)
        sequence.n_in_flight -= 1
        self._release(sequence)
        if sequence.resolved:
            self._retire(sequence)

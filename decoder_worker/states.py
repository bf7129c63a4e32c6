"""Projects encoder states that landed in a decoder into cross-attention KV.

On a GPU this runs in a stream of its own. A sequence begins to run once its KV is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from cluster.common.failed_batches import run_batch
from cluster.common.kernels.gpu.operators import scatters
from cluster.common.kv.cross_kv import CrossKVProjection
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.kv_scales import kv_scales
from cluster.common.model.streams import (
    PROJECT_PRIORITY,
    has_come,
    new_event,
    new_stream,
    on_stream,
    synchronize,
    upload,
)
from decoder_worker.scheduling.sequence import DecodeSequence


class Landing:
    """Launches projections and follows them to their end.

    Until then a sequence counts as in flight, since kernels may write to its pages. projection:
    None if KV itself travels. release: frees the landing pages. fail: gets a sequence whose
    projection failed alone. retire: gets a sequence that was answered meanwhile.
    """

    def __init__(
        self,
        projection: StatesProjection | None,
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
        return len(self._in_flight)

    def add(self, sequence: DecodeSequence) -> None:
        self._arrived.append(sequence)

    def step(self) -> None:
        """Launch the projections that have arrived, and settle those that are done."""
        arrived = [s for s in self._arrived if s.landing_pages and not s.resolved]
        self._arrived = []
        if arrived:
            assert self._projection is not None
            for sequence, projected in run_batch(arrived, self._projection.project, self._fail):
                sequence.n_in_flight += 1
                self._in_flight.append((sequence, projected))
        while self._in_flight and self._in_flight[0][1].is_done():
            self._settle()

    def wait(self) -> None:
        """Wait for the oldest projection in flight, if any, and settle it even if it failed."""
        if self._in_flight:
            try:
                self._in_flight[0][1].wait()
            finally:
                self._settle()

    def finish(self) -> None:
        while self._in_flight:
            self.wait()

    def _settle(self) -> None:
        sequence, _ = self._in_flight.popleft()
        sequence.n_in_flight -= 1
        self._release(sequence)
        if sequence.resolved:
            self._retire(sequence)


class StatesProjection:
    """Projects states into KV; owns no page. landing_pool: of states."""

    def __init__(
        self, checkpoint: Checkpoint, landing_pool: PagePool, cross_pool: PagePool
    ) -> None:
        self._landing_pool = landing_pool
        self._cross_pool = cross_pool
        self._stream = new_stream(cross_pool.device, PROJECT_PRIORITY)
        dtype, scales = landing_pool.tensor.dtype, kv_scales(checkpoint, cross_pool.tensor.dtype)
        self._projection = CrossKVProjection(checkpoint, dtype, cross_pool.device, scales)
        synchronize(cross_pool.device)  # the weights were loaded on another stream than reads them
        if self._stream is not None:
            scatters(cross_pool.tensor)  # checks our kernel; where it is wrong, torch's is used
        self.n_projected = 0

    @torch.inference_mode()
    def project(self, sequences: Sequence[DecodeSequence]) -> list[Projected]:
        """Launch the projection of landed states into the sequences' cross pages.

        Until it is done, nobody may read these, nor write to the landing pages.
        """
        self.n_projected += len(sequences)
        event = None
        if self._stream is None:
            for sequence in sequences:  # views, without a gather
                page = self._landing_pool.tensor[sequence.landing_pages[0]]
                self._write(page[None, : sequence.n_positions], [sequence])
        else:
            with on_stream(self._stream):
                self._project_alike(sequences)
                event = new_event(blocking=True)
                event.record(self._stream)
        return [Projected(event)] * len(sequences)

    def _project_alike(self, sequences: Sequence[DecodeSequence]) -> None:
        pool = self._landing_pool
        for n_positions in sorted({sequence.n_positions for sequence in sequences}):
            alike = [one for one in sequences if one.n_positions == n_positions]
            landed = upload([s.landing_pages[0] for s in alike], torch.int64, pool.device)
            self._write(pool.tensor[landed, :n_positions], alike)

    def _write(self, states: torch.Tensor, sequences: Sequence[DecodeSequence]) -> None:
        pages = [sequence.cross_pages for sequence in sequences]
        self._projection.write(states, self._cross_pool.tensor, pages)


class Projected:
    """A launched projection; without an event it is done already."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def is_done(self) -> bool:
        return self._event is None or has_come(self._event)

    def wait(self) -> None:
        """Return when the KV is in the pages; raises errors of the device."""
        if self._event is not None:
            self._event.synchronize()

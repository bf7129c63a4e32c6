"""From encoder states that have landed to cross-attention KV in the sequences' own pages.

The decoder's half of the `encoder_states` hand-off: what the encoder worker does otherwise, on the
decoder's device and, on a GPU, on a stream of its own, so that decode steps go on and the host
waits for nothing. The weights are loaded when states are expected, else with the first that come.
Owns no page: landing pages may be taken back once what `project` returned is done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cluster.kv.cross_kv import CrossKVProjection
from cluster.kv.pool import PagePool
from cluster.model.checkpoint import Checkpoint
from cluster.model.kv_scales import kv_scales
from cluster.model.streams import (
    PROJECT_PRIORITY,
    has_come,
    new_event,
    new_stream,
    on_stream,
    synchronize,
    upload,
)
from decoder_worker.scheduling.sequence import DecodeSequence

SHARE_OF_NEWEST = 0.2  # in the running mean of a projection's time


class StatesProjection:
    """Projects states into KV. For the thread that runs the decoder."""

    def __init__(self, checkpoint: Checkpoint, cross_pool: PagePool) -> None:
        self._checkpoint = checkpoint
        self._cross_pool = cross_pool
        self._stream = new_stream(cross_pool.device, PROJECT_PRIORITY)
        self._projections: dict[torch.dtype, CrossKVProjection] = {}
        self.projection_s = (
            0.0  # of one window of all positions, a running mean; 0.0 before the first
        )
        self.n_projected = 0

    def load(self, dtype: torch.dtype) -> CrossKVProjection:
        """The projection for states in `dtype`, loaded once.

        Raises:
            CheckpointError: the weights cannot be loaded.
        """
        if dtype not in self._projections:
            device = self._cross_pool.device
            scales = kv_scales(self._checkpoint, self._cross_pool.tensor.dtype)
            self._projections[dtype] = CrossKVProjection(self._checkpoint, dtype, device, scales)
            synchronize(device)  # the weights were loaded on another stream than will read them
        return self._projections[dtype]

    @torch.inference_mode()
    def project(self, sequences: Sequence[DecodeSequence]) -> list[Projected]:
        """Launch the projection of sequences whose states have landed, which are all of one pool.

        Mutates their cross-attention pages. Until it is done, nobody may read these, nor write to
        the landing pages.
        """
        pool = sequences[0].landing_pool
        assert pool is not None
        projection = self.load(pool.tensor.dtype)
        n_positions = sum(sequence.n_positions for sequence in sequences)
        begun, work = time.monotonic(), n_positions / pool.layout.n_frames
        self.n_projected += len(sequences)
        event = None
        if self._stream is None:
            for sequence in sequences:  # views, without a gather
                states = pool.tensor[sequence.landing_pages[0], : sequence.n_positions]
                projection.write(states[None], self._cross_pool.tensor, [sequence.cross_pages])
        else:
            with on_stream(self._stream):
                self._project_alike(projection, pool, sequences)
                event = new_event(blocking=True)
                event.record(self._stream)
        projected = Projected(event, begun, work, 0.0 if event else time.monotonic())
        return [projected] * len(sequences)

    def note(self, projected: Projected) -> None:
        """Take a projection that is done into the mean; once."""
        seconds = projected.seconds()
        if seconds is None:
            return
        if self.projection_s == 0.0:
            self.projection_s = seconds
        else:
            self.projection_s += SHARE_OF_NEWEST * (seconds - self.projection_s)

    def _project_alike(
        self,
        projection: CrossKVProjection,
        pool: PagePool,
        sequences: Sequence[DecodeSequence],
    ) -> None:
        """Those of one length together."""
        for n_positions in sorted({sequence.n_positions for sequence in sequences}):
            alike = [one for one in sequences if one.n_positions == n_positions]
            landed = upload([s.landing_pages[0] for s in alike], torch.int64, pool.device)
            states = pool.tensor[landed, :n_positions]
            pages = [sequence.cross_pages for sequence in alike]
            projection.write(states, self._cross_pool.tensor, pages)


class Projected:
    """A projection that was launched, of `work` windows of all positions.

    ended: monotonic seconds, where it was done when the launch returned: without an event.
    """

    def __init__(
        self, event: torch.cuda.Event | None, begun: float, work: float, ended: float
    ) -> None:
        self._event = event
        self._begun = begun
        self._work = work
        self._ended = ended
        self._is_noted = False

    def is_done(self) -> bool:
        return self._event is None or has_come(self._event)

    def wait(self) -> None:
        """Return when the KV is in the pages; raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()

    def seconds(self) -> float | None:
        """Of a window of all positions, until it was found done; None when asked again."""
        if self._is_noted:
            return None
        self._is_noted = True
        return ((self._ended or time.monotonic()) - self._begun) / self._work

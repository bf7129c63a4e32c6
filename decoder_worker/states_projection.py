"""From encoder states that have landed to cross-attention KV in the sequences' own pages.

The decoder's half of the `encoder_states` hand-off: what the encoder worker does otherwise, on the
decoder's device and thread, before a sequence's prompt is run. The weights are loaded when states
are expected, else with the first that come. Owns no page: the scheduler takes landing pages back
once `project` has returned.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from cluster.kv.pool import PagePool
from cluster.model.checkpoint import Checkpoint
from cluster.model.cross_kv import CrossKVProjection
from cluster.model.streams import default_stream
from decoder_worker.sequence import DecodeSequence

SHARE_OF_NEWEST = 0.2  # in the running mean of a projection's time


class StatesProjection:
    """Projects states into KV. For the thread that runs the decoder."""

    def __init__(self, checkpoint: Checkpoint, cross_pool: PagePool) -> None:
        self._checkpoint = checkpoint
        self._cross_pool = cross_pool
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
            self._projections[dtype] = CrossKVProjection(self._checkpoint, dtype, device)
        return self._projections[dtype]

    @torch.inference_mode()
    def project(self, sequences: Sequence[DecodeSequence]) -> list[None]:
        """Write the KV of sequences whose states have landed, which are all of one pool.

        Mutates their cross-attention pages; their landing pages may be written again afterwards.
        """
        pool = sequences[0].landing_pool
        assert pool is not None
        projection = self.load(pool.tensor.dtype)
        begun = time.monotonic()
        if self._cross_pool.device.type == "cpu":
            for sequence in sequences:  # views, without a gather
                states = pool.tensor[sequence.landing_pages[0], : sequence.n_positions]
                projection.write(states[None], self._cross_pool.tensor, [sequence.cross_pages])
        else:
            for n_positions in sorted({sequence.n_positions for sequence in sequences}):
                alike = [one for one in sequences if one.n_positions == n_positions]
                landed = torch.tensor([s.landing_pages[0] for s in alike], device=pool.device)
                pages = [sequence.cross_pages for sequence in alike]
                states = pool.tensor[landed, :n_positions]
                projection.write(states, self._cross_pool.tensor, pages)
            # On the default stream, so that decode steps in flight go on. The wait puts what is
            # launched next behind it, and the next READ into these pages, which knows no stream.
            default_stream(pool.device).synchronize()
        n_positions = sum(sequence.n_positions for sequence in sequences)
        work = n_positions / pool.layout.n_frames  # in windows of all positions
        self._note((time.monotonic() - begun) / work)
        self.n_projected += len(sequences)
        return [None] * len(sequences)

    def _note(self, seconds: float) -> None:
        if self.projection_s == 0.0:
            self.projection_s = seconds
        else:
            self.projection_s += SHARE_OF_NEWEST * (seconds - self.projection_s)

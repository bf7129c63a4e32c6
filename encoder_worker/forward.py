"""From windows of PCM to cross K/V in pages: mel, encoder and projection on one device.

The computation of a batch and nothing else; who owns the pages and who waits for them is the
engine's business. On a CPU it happens in the call; on a GPU the call launches it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.messages import FileMel
from cluster.model.checkpoint import Checkpoint
from cluster.model.cross_kv import CrossKVProjection
from cluster.model.streams import ENCODE_PRIORITY, new_stream
from cluster.model.weights import TORCH_DTYPES
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from encoder_worker.scatter import has_kernel
from encoder_worker.static_encoder import AlreadyDone, EventReady, Ready, StaticEncoder

logger = logging.getLogger(__name__)


class WindowEncoder:
    """All of the encoder worker's weights, with a call."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: str) -> None:
        """Load onto `device` ("cpu" or "cuda"), computing in `dtype`, a key of TORCH_DTYPES."""
        torch_dtype = TORCH_DTYPES[dtype]
        self.device = device
        self.dtype = dtype
        self._mel = LogMel(checkpoint.dims.n_mels, device)
        self._encoder = AudioEncoder(checkpoint, torch_dtype, device)
        self._projection = CrossKVProjection(checkpoint, torch_dtype, device)
        self._stream = new_stream(device, ENCODE_PRIORITY)
        self._static: StaticEncoder | None = None  # made by `prepare`

    @property
    def is_async(self) -> bool:
        """Whether a call returns before its batch is done, so that the next can be launched."""
        return self._stream is not None

    def prepare(self, pool: Tensor, max_batch: int) -> None:
        """On a GPU: capture the graphs that write to `pool`. Call on the thread that will call."""
        if self._stream is None:
            return
        if not has_kernel():
            logger.warning("Triton does not load: the encoder runs without CUDA graphs")
            return
        self._static = StaticEncoder(
            self._mel, self._encoder, self._projection, pool, max_batch, self._stream
        )
        logger.info("CUDA graphs for batches of %s", self._static.graphs.captured)

    @torch.inference_mode()
    def __call__(
        self,
        windows: Sequence[NDArray[Any]],
        pool: Tensor,
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None] | None = None,
    ) -> Ready:
        """Encode `windows` into their pages.

        Args:
            windows: each int16 [n], n <= 480000, and its context where it has a `FileMel`.
            pool: [n_pages, L, 2, page_frames, H, Dh], the pool's tensor. Mutated.
            pages: per window its pages in frame order.
            file_mels: per window what makes it a slice of its file; None where nothing does.

        Returns:
            What to wait for before anyone may read the pages: a reader comes as soon as its
            handle is out, past any stream's order.
        """
        if self._static is not None:
            return self._static(windows, pages, file_mels)
        if self._stream is None:
            self._projection.write(self._encoder(self._mel(windows, file_mels)), pool, pages)
            return AlreadyDone()
        self._stream.wait_stream(torch.cuda.default_stream())  # that loaded the weights
        with torch.cuda.stream(self._stream):
            self._projection.write(self._encoder(self._mel(windows, file_mels)), pool, pages)
        return EventReady(self._stream)

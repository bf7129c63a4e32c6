"""From windows of PCM to cross K/V in pages: mel, encoder and projection on one device.

The computation of a batch and nothing else; who owns the pages and who waits for them is the
engine's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.messages import FileMel
from cluster.model.checkpoint import Checkpoint
from cluster.model.cross_kv import CrossKVProjection
from cluster.model.weights import TORCH_DTYPES
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder


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

    @torch.inference_mode()
    def __call__(
        self,
        windows: Sequence[NDArray[Any]],
        pool: Tensor,
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None] | None = None,
    ) -> None:
        """Encode `windows` into their pages, and return when the bytes are there.

        Args:
            windows: each int16 [n], n <= 480000, and its context where it has a `FileMel`.
            pool: [n_pages, L, 2, page_frames, H, Dh], the pool's tensor. Mutated.
            pages: per window its pages in frame order.
            file_mels: per window what makes it a slice of its file; None where nothing does.
        """
        states = self._encoder(self._mel(windows, file_mels))
        self._projection.write(states, pool, pages)
        if self.device != "cpu":
            # A reader may come as soon as the handle is out, past this stream's order.
            torch.cuda.synchronize()

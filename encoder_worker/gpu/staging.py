"""Copies a batch's samples and page numbers into the fixed memory that CUDA graphs read.

The host fills pinned memory, which is copied in the compute stream's order. The batch before may
still compute, but its copy is done, so the host does not wait for that memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.common.kernels.gpu.operators import NO_PAGE
from cluster.common.messages import FileMel
from cluster.common.model.streams import new_event
from encoder_worker.mel import N_MARKS, ROW_SAMPLES, marks_of


@dataclass(frozen=True, slots=True)
class BatchInputs:
    pcm: Tensor  # int16 [B, ROW_SAMPLES]
    marks: Tensor  # int32 [B, N_MARKS], see `mel.marks_of`
    pages: Tensor  # int32 [B, pages of a window]; NO_PAGE where a row has no window

    @classmethod
    def make(cls, n: int, pages_per_window: int, device: torch.device, pinned: bool) -> BatchInputs:
        """Silence without pages."""
        options: dict[str, Any] = {"device": device, "pin_memory": pinned}
        return cls(
            torch.zeros((n, ROW_SAMPLES), dtype=torch.int16, **options),
            torch.zeros((n, N_MARKS), dtype=torch.int32, **options),
            torch.full((n, pages_per_window), NO_PAGE, dtype=torch.int32, **options),
        )

    def first(self, n: int) -> BatchInputs:
        """Views of the first `n` rows."""
        return BatchInputs(self.pcm[:n], self.marks[:n], self.pages[:n])


class Staging:
    def __init__(self, n: int, pages_per_window: int, device: torch.device) -> None:
        self.inputs = self._host = BatchInputs.make(n, pages_per_window, device, False)
        self._sent = None
        if device.type == "cuda":
            self._host = BatchInputs.make(n, pages_per_window, torch.device("cpu"), True)
            self._sent = new_event()

    def put(
        self,
        windows: Sequence[NDArray[Any]],
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None],
        size: int,
    ) -> None:
        """Copy a batch in the current stream's order; other rows up to `size` get no pages."""
        if self._sent is not None:
            self._sent.synchronize()  # or the host would overwrite what is being sent
        lengths = self._fill(windows, pages, file_mels)
        if self._sent is not None:
            for row, n in enumerate(lengths):
                self.inputs.pcm[row, :n].copy_(self._host.pcm[row, :n], non_blocking=True)
            self.inputs.marks[:size].copy_(self._host.marks[:size], non_blocking=True)
            self.inputs.pages[:size].copy_(self._host.pages[:size], non_blocking=True)
            self._sent.record()

    def _fill(
        self,
        windows: Sequence[NDArray[Any]],
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None],
    ) -> list[int]:
        """Write a batch into host memory, no pages in other rows; returns each row's samples."""
        pcm, marks, table = (
            t.numpy() for t in (self._host.pcm, self._host.marks, self._host.pages)
        )
        table[:] = NO_PAGE
        lengths = []
        for row, (window, own, file_mel) in enumerate(zip(windows, pages, file_mels, strict=True)):
            n = min(window.shape[0], ROW_SAMPLES)  # context that no frame sees is left out
            pcm[row, :n] = window[:n]
            *numbers, log_max = marks_of(n, file_mel)
            marks[row, :-1] = numbers
            marks[row, -1:].view(np.float32)[0] = log_max
            table[row, : len(own)] = own
            lengths.append(n)
        return lengths

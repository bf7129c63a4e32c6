"""Brings a batch's samples and page numbers to the device, beside its compute stream.

A slot is pinned host memory, a landing place on the device, and an event for each direction. The
upload goes over its own stream while the batch before computes; the compute stream waits for it and
moves it into the one static place that graphs read. Two slots: one computes, one is filled.
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
from cluster.common.model.streams import current_stream, new_event, new_stream, on_stream
from encoder_worker.mel import INT16_SCALE, N_MARKS, ROW_SAMPLES, marks_of

N_SLOTS = 2


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What a batch's computation reads.

    pcm: int16 [B, ROW_SAMPLES]; marks: int32 [B, N_MARKS], see `mel.marks_of`; pages: int32
    [B, pages of a window], NO_PAGE where a row is no window.
    """

    pcm: Tensor
    marks: Tensor
    pages: Tensor

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
        """The first `n` rows, as views."""
        return BatchInputs(self.pcm[:n], self.marks[:n], self.pages[:n])


class _Slot:
    def __init__(self, n: int, pages_per_window: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.host = BatchInputs.make(n, pages_per_window, torch.device("cpu"), on_gpu)
        self.landing = self.host
        if on_gpu:
            self.landing = BatchInputs.make(n, pages_per_window, device, False)
        self.uploaded = new_event() if on_gpu else None
        self.taken = new_event() if on_gpu else None  # the landing place was read

    def fill(
        self,
        windows: Sequence[NDArray[Any]],
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None],
    ) -> list[int]:
        """Write a batch into host memory; returns each row's samples. Other rows get no pages."""
        pcm, marks, table = (t.numpy() for t in (self.host.pcm, self.host.marks, self.host.pages))
        table[:] = NO_PAGE
        lengths = []
        for row, (window, own, file_mel) in enumerate(zip(windows, pages, file_mels, strict=True)):
            n = min(window.shape[0], ROW_SAMPLES)  # context that no frame sees is left out
            pcm[row, :n] = _as_int16(window[:n])
            *numbers, log_max = marks_of(n, file_mel)
            marks[row, :-1] = numbers
            marks[row, -1:].view(np.float32)[0] = log_max
            table[row, : len(own)] = own
            lengths.append(n)
        return lengths


class Staging:
    """`put` brings a batch into `inputs`, in the current stream's order."""

    def __init__(self, n: int, pages_per_window: int, device: torch.device) -> None:
        self.inputs = BatchInputs.make(n, pages_per_window, device, False)
        self._slots = [_Slot(n, pages_per_window, device) for _ in range(N_SLOTS)]
        self._turn = 0
        self._copies = new_stream(device)

    def put(
        self,
        windows: Sequence[NDArray[Any]],
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None],
        size: int,
    ) -> None:
        """Fill the first `size` rows of `inputs`: the batch's, then rows without pages."""
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % N_SLOTS
        if slot.uploaded is not None:
            slot.uploaded.synchronize()  # or the host would overwrite what is being sent
        lengths = slot.fill(windows, pages, file_mels)
        if self._copies is not None:
            self._upload(slot, self._copies, lengths, size)
        for row, n in enumerate(lengths):
            self.inputs.pcm[row, :n].copy_(slot.landing.pcm[row, :n])
        self.inputs.marks[:size].copy_(slot.landing.marks[:size])
        self.inputs.pages[:size].copy_(slot.landing.pages[:size])
        if slot.taken is not None:
            slot.taken.record()

    def _upload(
        self, slot: _Slot, copies: torch.cuda.Stream, lengths: Sequence[int], size: int
    ) -> None:
        """Send what was filled over the copy stream, and have the current one wait for it."""
        assert slot.uploaded is not None
        assert slot.taken is not None
        with on_stream(copies):
            copies.wait_event(slot.taken)
            for row, n in enumerate(lengths):
                slot.landing.pcm[row, :n].copy_(slot.host.pcm[row, :n], non_blocking=True)
            slot.landing.marks[:size].copy_(slot.host.marks[:size], non_blocking=True)
            slot.landing.pages[:size].copy_(slot.host.pages[:size], non_blocking=True)
            slot.uploaded.record()
        current_stream(self.inputs.pcm.device).wait_event(slot.uploaded)


def _as_int16(window: NDArray[Any]) -> NDArray[Any]:
    """Samples as they are sent: floats in -1..1, which only tests and benchmarks have, rounded."""
    if window.dtype == np.int16:
        return window
    return np.clip(np.rint(window * INT16_SCALE), -32_768, 32_767).astype(np.int16)

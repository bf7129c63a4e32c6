"""Copies results from the device to the host; nothing waits for them until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.model.streams import new_event


class Readback:
    """Copies of device tensors as they are at this point of the current stream.

    On a GPU they lie in pinned memory, which torch does not use again before the copy has been
    made. On a CPU they are the tensors themselves, unless these are `reused`: written again before
    they are read.
    """

    def __init__(self, tensors: Sequence[Tensor | None], *, reused: bool = False) -> None:
        """tensors: the first is one; None stays None."""
        self._event: torch.cuda.Event | None = None
        assert tensors[0] is not None
        if tensors[0].device.type == "cpu":
            copy = torch.clone if reused else _itself
            self._tensors = [None if t is None else copy(t) for t in tensors]
            return
        self._tensors = [None if t is None else _on_its_way(t) for t in tensors]
        self._event = new_event()
        self._event.record()

    def wait(self) -> list[Tensor | None]:
        """The tensors, on the CPU; blocks until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _on_its_way(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)

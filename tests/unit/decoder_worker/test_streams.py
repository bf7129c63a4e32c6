"""What the runner makes before its device is synchronised, nothing makes on another stream later.

A stream of one's own does not wait for the default one, on which tensors are filled where nobody
says otherwise: a buffer filled there after the only synchronisation may be read before it is
filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.common.model.streams import ENCODE_PRIORITY
from decoder_worker import model_runner
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.model_runners import RunnerBench


class Streams(TorchDispatchMode):
    """Notes each operation that runs outside the runner's stream once `synchronize` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronized = 0
        self.outside: list[str] = []
        self.n_inside = 0
        self._inside = False

    def synchronize(self, device: Any) -> None:
        self.synchronized += 1

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside:
            self.n_inside += 1
        elif self.synchronized:
            self.outside.append(str(func))
        return func(*args, **(kwargs or {}))


def test_all_buffers_exist_before_the_device_is_synchronised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams, priorities = Streams(), list[int]()

    def new_stream(device: torch.device, priority: int) -> object:
        priorities.append(priority)
        return object()

    monkeypatch.setattr(model_runner, "new_stream", new_stream)
    monkeypatch.setattr(model_runner, "on_stream", streams.on_stream)
    monkeypatch.setattr(model_runner, "synchronize", streams.synchronize)
    with streams:
        RunnerBench(cached_checkpoint(), 2, "cpu", "float32", bucketed=True)
    assert streams.synchronized
    assert streams.n_inside > 0  # the buckets were captured
    assert streams.outside == []
    assert max(priorities) < ENCODE_PRIORITY, "an encoder beside it goes first"

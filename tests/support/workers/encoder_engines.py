"""An encoder engine on a bench: over the in-memory transport, its forward pass in our hands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.cross_kv import CrossKVProjection, packed_page
from cluster.common.kv.layout import PageLayout
from cluster.common.messages import CrossKVHandle, EncodeReply, EncodeRequest, FileMel
from cluster.common.metrics import Recorder
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.encoder_context import FULL
from cluster.common.settings import EncoderSettings
from encoder_worker.cpu.team import TeamEncoder
from encoder_worker.engine import EncoderEngine
from encoder_worker.gpu.static_encoder import Wait
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder
from tests.support.kv.ends import MemoryExporter
from tests.support.references.hugging_face import make_pcm

PATIENCE_S = 30.0


class Replaced:
    def __init__(self, call: Callable[..., Wait], is_async: bool = False) -> None:
        self._call = call
        self.is_async = is_async

    def __call__(self, *args: Any) -> Wait:
        return self._call(*args)

    def close(self) -> None:
        """Nothing to end."""


class Bench:
    def __init__(
        self,
        checkpoint: Checkpoint,
        n_windows: int = 4,
        page_frames: int = 0,
        layout: PageLayout | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        **settings: Any,
    ) -> None:
        self.checkpoint = checkpoint
        layout = layout or kv_layout(checkpoint, page_frames)
        self.exporter = MemoryExporter(
            layout, n_windows * layout.pages_per_window, cluster_key=b"k" * 32, lease_s=60.0
        )
        settings.setdefault("max_batch", 8)
        chosen = EncoderSettings(**{"device": "cpu", "threads": 1, "dtype": "float32", **settings})
        self.engine = EncoderEngine(checkpoint, self.exporter, chosen, recorder, clock=clock)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batch_sizes: list[int] = []
        self.poison: int | None = None  # a batch with a window of this many samples raises
        self.poisoned_by: Exception = RuntimeError("this one cannot be")
        self._forward = self.engine._loops[0].forward
        self.engine._loops[0].forward = Replaced(self._gated)  # type: ignore[assignment]
        self.lanes_gate = threading.Event()  # the other lanes encode while it is set
        self.lanes_gate.set()
        for loop in self.engine._loops[1:]:
            gated = Replaced(partial(self._lane_gated, loop.forward))
            loop.forward = gated  # type: ignore[assignment]

    def _gated(
        self,
        windows: Sequence[NDArray[Any]],
        pool: torch.Tensor,
        pages: Sequence[Sequence[int]],
        file_mels: Sequence[FileMel | None] | None = None,
        context: int = FULL,
    ) -> Wait:
        self.batch_sizes.append(len(windows))
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if any(len(window) == self.poison for window in windows):
            raise self.poisoned_by
        return self._forward(windows, pool, pages, file_mels, context)

    def _lane_gated(self, forward: Callable[..., Wait], *args: Any) -> Wait:
        assert self.lanes_gate.wait(PATIENCE_S)
        return forward(*args)

    def submit(
        self, pcm: NDArray[np.int16], name: str = "r", remaining_s: float = 60.0, **options: Any
    ) -> Future[EncodeReply]:
        return self.engine.submit(EncodeRequest(name, 0, 0, pcm, remaining_s, **options))

    def hold(
        self, name: str = "held", pcm: NDArray[np.int16] | None = None, **options: Any
    ) -> Future[EncodeReply]:
        """Send a window and keep the engine inside of its forward pass until `gate.set()`."""
        self.gate.clear()
        self.entered.clear()
        future = self.submit(make_pcm(0.1) if pcm is None else pcm, name, **options)
        assert self.entered.wait(PATIENCE_S)
        return future

    def kv(self, handle: CrossKVHandle) -> torch.Tensor:
        """[T, L, 2, H, Dh] as it lies in the handle's pages."""
        pool = self.exporter.pool
        pages = [pool.tensor[pool.page_at(address)] for address in handle.addresses]
        if pool.packs:
            pages = [packed_page(pages[0], handle.frames)]
        return torch.cat([page.permute(2, 0, 1, 3, 4) for page in pages])[: handle.frames]

    def expected_kv(
        self, pcm: NDArray[np.int16], file_mel: FileMel | None = None, context: int = 1500
    ) -> torch.Tensor:
        with torch.inference_mode():
            mel = LogMel(self.checkpoint.dims.n_mels)([pcm], [file_mel])[:, :, : 2 * context]
            states = AudioEncoder(self.checkpoint)(mel)
            return CrossKVProjection(self.checkpoint).project(states)[0]

    def close(self) -> None:
        self.gate.set()
        self.lanes_gate.set()
        self.engine.close()
        self.exporter.close()


MakeBench = Callable[..., Bench]


def encode_by(team: TeamEncoder, mel: torch.Tensor, n_state: int) -> torch.Tensor:
    """States [B, T, n_state] of features [B, n_mels, 2 * T], float32; each row is written once."""
    states = torch.full((len(mel), mel.shape[2] // 2, n_state), float("nan"))

    def put(row: torch.Tensor) -> Callable[[torch.Tensor, int], None]:
        def sink(rows: torch.Tensor, begin: int) -> None:
            assert row[begin : begin + len(rows)].isnan().all(), "a row came twice"
            row[begin : begin + len(rows)] = rows.float()

        return sink

    for future in [team.submit(mel[i : i + 1], put(row)) for i, row in enumerate(states)]:
        future.result(PATIENCE_S)
    return states

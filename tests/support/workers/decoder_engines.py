"""Engines on random checkpoints with KV published in this process, for tests of the decoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.pool import PagePool
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.settings import DecoderSettings
from decoder_worker.backends import choose_attention, torch_attention
from decoder_worker.engine import DecoderEngine
from tests.support.kv.ends import MemoryExporter, memory_importer

KEY = b"key of the tests"
ANSWER_S = 60.0  # generous: a test waits for a condition, never for a time


@dataclass
class Stand:
    """An engine, the exporter that it reads from, and what was published there."""

    checkpoint: Checkpoint
    exporter: MemoryExporter
    importer: KVImporter
    engine: DecoderEngine

    def publish(self, seed: int, kv: torch.Tensor | None = None) -> CrossKVHandle:
        """Publish one window's KV, [n_frames, layer, 2, head, head_dim]; random if not given."""
        layout = self.exporter.layout
        pages = self.exporter.reserve(layout.pages_per_window, ANSWER_S)
        assert pages is not None
        kv = random_kv(layout, seed) if kv is None else kv
        write_window(self.exporter.pool.tensor, pages, kv)
        return self.exporter.publish(
            pages, request_id="test", window=seed, attempt=0, frames=layout.n_frames
        )

    def request(
        self,
        seed: int = 0,
        *,
        remaining_s: float = ANSWER_S,
        handle: CrossKVHandle | None = None,
        **options: Any,
    ) -> DecodeRequest:
        """A request for window `seed`, published now; `options` as in DecodeOptions."""
        return DecodeRequest(
            request_id="test",
            window=seed,
            attempt=0,
            handle=self.publish(seed) if handle is None else handle,
            options=DecodeOptions(**{"language": "en", "max_new_tokens": 12, **options}),
            remaining_s=remaining_s,
        )

    def assert_all_returned(self) -> None:
        """Every sequence, page, slot and lease comes back, in time."""
        wait_until(lambda: self.engine.drain(0.0), "sequences are live")
        self.engine.check_integrity()
        wait_until(lambda: self.exporter.n_leases == 0, "leases are held")
        wait_until(lambda: self.exporter.pool.n_used == 0, "exported pages are held")


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + ANSWER_S
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.002)


def random_kv(layout: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.n_frames, layout.n_layer, 2, layout.n_head, layout.head_dim)
    return torch.randn(shape, generator=generator)


def write_window(pool: torch.Tensor, pages: tuple[int, ...], kv: torch.Tensor) -> None:
    """pool [page, layer, 2, page_frames, head, head_dim]; kv [frames, layer, 2, head, head_dim]."""
    page_frames = pool.shape[3]
    for page, part in zip(pages, kv.split(page_frames), strict=True):
        pool[page, :, :, : len(part)] = part.permute(1, 2, 0, 3, 4)


@contextmanager
def make_stand(
    folder: Path,
    *,
    page_frames: int = 0,
    page_tokens: int = 0,
    kv_dtype: str = "float32",
    export_windows: int = 8,
    landing_windows: int = 4,
    fetch_timeout_s: float = 10.0,
    reads_states: bool = False,
    bucketed: bool = False,
    device: str = "cpu",
    **settings: Any,
) -> Iterator[Stand]:
    """Everything is closed at the end, and every page must be back by then.

    reads_states: the exporter publishes encoder states, which land in `landing_windows` pages.
    bucketed: run decode steps at fixed sizes, as a GPU does. device: of both pools; on a GPU the
    settings choose the attention.
    """
    chosen = DecoderSettings(
        **{"max_batch": 4, "kv_windows": 4, "threads": 1, "dtype": "float32", **settings}
    )
    checkpoint = open_checkpoint(str(folder))
    kv = kv_layout(checkpoint, page_frames, kv_dtype, device)
    layout = states_layout(checkpoint) if reads_states else kv
    n_pages = layout.pages_per_window
    exporter = MemoryExporter(layout, export_windows * n_pages, cluster_key=KEY, device=device)
    options: dict[str, Any] = {
        "cluster_key": KEY,
        "device": device,
        "fetch_timeout_s": fetch_timeout_s,
    }
    n_windows = landing_windows if reads_states else chosen.kv_windows
    importer = memory_importer(layout, n_windows * n_pages, **options)
    kv_pool = None
    if reads_states:
        kv_pool = PagePool(kv, chosen.kv_windows * kv.pages_per_window, device)
    choose = choose_attention if device != "cpu" else partial(_torch_attention, bucketed)
    with patch("decoder_worker.build.choose_attention", choose):
        engine = DecoderEngine(
            checkpoint,
            importer,
            chosen,
            kv_pool=kv_pool,
            page_tokens=page_tokens,
        )
    try:
        yield Stand(checkpoint, exporter, importer, engine)
    finally:
        engine.close()
        importer.close()
        exporter.close()


def _torch_attention(
    bucketed: bool,
    setting: str,
    own: torch.Tensor,
    cross: torch.Tensor,
    threads: int,
    *,
    packed: bool,
) -> Any:
    return torch_attention(own, cross, bucketed=bucketed, packed=packed)

"""Aligners over pages of random windows, or of given ones, for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.alignment.heads import AlignmentHeads
from decoder_worker.alignment.token_times import Aligner, AlignmentItem
from decoder_worker.backends import load_decoders, torch_attention
from decoder_worker.model_runner import self_kv_layout
from tests.support.workers.decoder_engines import random_kv, write_window


class Bench:
    """An aligner over pools that hold some windows of random KV, pages in no order."""

    def __init__(
        self,
        folder: Path,
        n_windows: int = 4,
        *,
        page_frames: int = 0,
        page_tokens: int = 0,
        kv_dtype: str = "float32",
    ) -> None:
        checkpoint = open_checkpoint(str(folder))
        self.tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        layout = kv_layout(checkpoint, page_frames, kv_dtype)
        own = self_kv_layout(checkpoint, "float32", page_tokens)
        self.cross_pool = PagePool(layout, n_windows * layout.pages_per_window)
        self.self_pool = PagePool(own, n_windows * own.pages_per_window)
        self.self_pool.tensor.fill_(torch.nan)  # what a text does not write reaches nothing
        self.cross_pages = _shuffled(layout.pages_per_window, n_windows)
        self.self_pages = _shuffled(own.pages_per_window, n_windows)
        for window in range(n_windows):
            self.write(window, random_kv(layout, window))
        pools = (self.self_pool.tensor, self.cross_pool.tensor)
        decoder = load_decoders(checkpoint, torch_attention(*pools), *pools).torch
        heads = AlignmentHeads(checkpoint, decoder, self.cross_pool, self.self_pool)
        self.aligner = Aligner(checkpoint, self.tokenizer, decoder, heads)

    def write(self, window: int, kv: torch.Tensor) -> None:
        """kv [n_frames, layer, 2, head, head_dim]."""
        write_window(self.cross_pool.tensor, self.cross_pages[window], kv)

    def item(
        self, window: int, tokens: int | tuple[int, ...], content_frames: int = 3000
    ) -> AlignmentItem:
        """`tokens` themselves, or how many random ones."""
        if isinstance(tokens, int):
            rng = np.random.default_rng(window)
            tokens = tuple(rng.integers(0, self.tokenizer.special.eot, tokens).tolist())
        return AlignmentItem(
            cross_pages=self.cross_pages[window],
            self_pages=self.self_pages[window],
            language="en",
            task="transcribe",
            tokens=tokens,
            content_frames=content_frames,
            n_positions=self.cross_pool.layout.n_frames,
        )


def _shuffled(n_each: int, n: int) -> list[tuple[int, ...]]:
    """Pages of each of n windows."""
    order = np.random.default_rng(7).permutation(n_each * n).tolist()
    return [tuple(order[i * n_each : (i + 1) * n_each]) for i in range(n)]

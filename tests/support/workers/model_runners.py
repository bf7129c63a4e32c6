"""A runner with slots and pages, without engine and hand-off, for tests."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.pool import PagePool
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest, TokenAlignment
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.device import resolve_dtype
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Attention
from decoder_worker.alignment import KnownText
from decoder_worker.attention.base import AttentionBatch
from decoder_worker.backends import choose_attention, load_decoders
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence
from tests.support.workers.decoder_engines import random_kv, write_window

N_NEW_MAX = 64


class RunnerBench:
    def __init__(
        self,
        folder: Path,
        n_slots: int,
        device: str,
        dtype: str,
        *,
        threads: int = 1,
        kv_dtype: str = "",
        page_frames: int = 0,
        page_tokens: int = 0,
        attention: Attention = "auto",
    ) -> None:
        self.checkpoint = checkpoint = open_checkpoint(str(folder))
        self.tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self.prompts = PromptBuilder(self.tokenizer, checkpoint.dims)
        int8 = dtype == "int8"
        dtype = resolve_dtype(dtype, device)
        layout = kv_layout(checkpoint, page_frames, kv_dtype or dtype, device)
        own = self_kv_layout(checkpoint, dtype, page_tokens)
        cross_pool = PagePool(layout, n_slots * layout.pages_per_window, device)
        self_pool = PagePool(own, n_slots * own.pages_per_window + 1, device)
        self.pools = (cross_pool, self_pool)
        self.cross_pages = _shuffled(cross_pool, n_slots)
        self.self_pages = _shuffled(self_pool, n_slots)
        pools = (self_pool.tensor, cross_pool.tensor)
        packed = cross_pool.packs
        attentions = choose_attention(attention, *pools, threads, packed=packed)
        self.decoders = load_decoders(checkpoint, attentions, *pools, int8=int8, packed=packed)
        self.runner = ModelRunner(
            checkpoint, self.tokenizer, cross_pool, self_pool, n_slots, self.decoders
        )
        for slot in range(n_slots):  # last: a GPU's look at start writes to pages
            self.write(slot, random_kv(layout, slot).to(cross_pool.device))

    def write(self, slot: int, kv: torch.Tensor) -> None:
        """The slot's window: kv [n_frames, layer, 2, head, head_dim]."""
        write_window(self.pools[0].tensor, self.cross_pages[slot], kv)

    def free(self) -> None:
        cross_pool, self_pool = self.pools
        for cross, own in zip(self.cross_pages, self.self_pages, strict=True):
            cross_pool.release(cross)
            self_pool.release(own)

    def sequence(self, slot: int, options: DecodeOptions) -> DecodeSequence:
        handle = CrossKVHandle("r", slot, 0, "agent", b"", "", (), 0, 1500, 0, 0, "lease", 1.0)
        sequence = DecodeSequence(
            DecodeRequest("r", slot, 0, handle, options, 1.0),
            Future(),
            arrived_s=0.0,
            deadline_s=1.0,
            n_new_max=N_NEW_MAX,
            language=options.language,
            rows=[Row(slot, self.self_pages[slot])],
            cross_pages=self.cross_pages[slot],
        )
        sequence.begin_attempt(self.prompts.eot)
        if options.language is not None:
            sequence.prompt = self.prompts.prompt(options, options.language)
        return sequence


class AlignerBench(RunnerBench):
    """On torch's attention in float32; what a text does not write of the self pool is NaN."""

    def __init__(self, folder: Path, n_windows: int = 4, **options: Any) -> None:
        super().__init__(folder, n_windows, "cpu", "float32", attention="torch", **options)
        self.cross_pool, self_pool = self.pools
        self_pool.tensor.fill_(torch.nan)

    def align(self, items: list[KnownText]) -> list[TokenAlignment]:
        return [pending.find() for pending in self.runner._aligner.align(items)]

    def item(
        self, window: int, tokens: int | tuple[int, ...], content_frames: int = 3000
    ) -> KnownText:
        if isinstance(tokens, int):
            rng = np.random.default_rng(window)
            tokens = tuple(rng.integers(0, self.tokenizer.special.eot, tokens).tolist())
        return KnownText(
            cross_pages=self.cross_pages[window],
            self_pages=self.self_pages[window],
            language="en",
            task="transcribe",
            tokens=tokens,
            content_frames=content_frames,
            n_positions=self.cross_pool.layout.n_frames,
        )


def _shuffled(pool: PagePool, n: int) -> list[tuple[int, ...]]:
    n_each = pool.layout.pages_per_window
    pages = pool.allocate(n_each * n)
    assert pages is not None
    order = np.random.default_rng(7).permutation(pages).tolist()
    return [tuple(order[i * n_each : (i + 1) * n_each]) for i in range(n)]


def rows_of(batch: AttentionBatch, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of a forward over `batch`, and the last positions of each entry."""
    kv = batch.self_kv
    lengths = (kv.kv_indptr.diff() - 1) * page_tokens + kv.kv_last_page_len
    spans = zip(lengths.tolist(), kv.qo_indptr.diff().tolist(), strict=True)
    positions = [place for length, n in spans for place in range(length - n, length)]
    return torch.arange(len(positions)) + 11, torch.tensor(positions)

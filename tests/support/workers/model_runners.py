"""A runner with slots and pages, without engine and hand-off, for tests."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import torch

from cluster.common.kv.connect import kv_layout
from cluster.common.kv.pool import PagePool
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.device import resolve_dtype
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Attention
from decoder_worker.backends import choose_attention, load_decoders, torch_attention
from decoder_worker.model_runner import ModelRunner, self_kv_layout
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence
from tests.support.workers.decoder_engines import random_kv, write_window

N_NEW_MAX = 64


class RunnerBench:
    """`n_slots` slots, each with a random window of its own.

    dtype: as in DecoderSettings. bucketed: on a CPU too, at fixed sizes, as a GPU does.
    threads: that share out few rows there. kv_dtype: of the windows ["dtype"].
    """

    def __init__(
        self,
        folder: Path,
        n_slots: int,
        device: str,
        dtype: str,
        *,
        bucketed: bool = False,
        threads: int = 1,
        kv_dtype: str = "",
        page_tokens: int = 0,
        attention: Attention = "auto",
    ) -> None:
        self.checkpoint = checkpoint = open_checkpoint(str(folder))
        self.tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self.prompts = PromptBuilder(self.tokenizer, checkpoint.dims)
        int8 = dtype == "int8"
        dtype = resolve_dtype(dtype, device)
        layout = kv_layout(checkpoint, 0, kv_dtype or dtype, device)
        own = self_kv_layout(checkpoint, dtype, page_tokens)
        cross_pool = PagePool(layout, n_slots * layout.pages_per_window, device)
        self_pool = PagePool(own, n_slots * own.pages_per_window + 1, device)
        self.pools = (cross_pool, self_pool)
        self._rows: list[tuple[int, tuple[int, ...]]] = []
        self._windows: list[tuple[int, ...]] = []
        for slot in range(n_slots):
            pages = cross_pool.allocate(layout.pages_per_window)
            own_pages = self_pool.allocate(own.pages_per_window)
            assert pages is not None
            assert own_pages is not None
            self._windows.append(pages)
            self._rows.append((slot, own_pages))
            self.write(slot, random_kv(layout, slot).to(cross_pool.device))
        pools = (self_pool.tensor, cross_pool.tensor)
        packed = cross_pool.packs
        attentions = choose_attention(attention, *pools, threads, packed=packed)
        if bucketed and device == "cpu":
            attentions = torch_attention(*pools, bucketed=True, packed=packed)
        self.decoders = load_decoders(checkpoint, attentions, *pools, int8=int8, packed=packed)
        self.runner = ModelRunner(
            checkpoint, self.tokenizer, cross_pool, self_pool, n_slots, self.decoders
        )

    def write(self, slot: int, kv: torch.Tensor) -> None:
        """The slot's window: kv [n_frames, layer, 2, head, head_dim]."""
        write_window(self.pools[0].tensor, self._windows[slot], kv)

    def free(self) -> None:
        """Give all pages back, as before an engine's first window."""
        cross_pool, self_pool = self.pools
        for pages, (_, own) in zip(self._windows, self._rows, strict=True):
            cross_pool.release(pages)
            self_pool.release(own)

    def sequence(self, slot: int, options: DecodeOptions) -> DecodeSequence:
        """Ready for its prompt, in `slot`."""
        handle = CrossKVHandle("r", slot, 0, "agent", b"", "", (), 0, 1500, 0, 0, "lease", 1.0)
        sequence = DecodeSequence(
            DecodeRequest("r", slot, 0, handle, options, 1.0),
            Future(),
            arrived=0.0,
            deadline=1.0,
            n_new_max=N_NEW_MAX,
            language=options.language,
            rows=[Row(*self._rows[slot])],
            cross_pages=self._windows[slot],
        )
        sequence.begin_attempt(self.prompts.eot)
        if options.language is not None:
            sequence.prompt = self.prompts.prompt(options, options.language)
        return sequence

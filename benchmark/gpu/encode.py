"""The encoder's section of `benchmark.gpu`: windows per second, by batch and way into the pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmark.gpu import roofline
from benchmark.gpu.profiles import profiled
from benchmark.gpu.rig import PAGE_FRAMES, Clock, Record, Rig, clip
from cluster.gpu.kernels import has_triton
from cluster.gpu.scatter import scatter_pages
from cluster.kv.cross_kv import CrossKVProjection, Unprojected, as_kv_pool, cross_kv_parts
from cluster.kv.layout_for import kv_layout
from cluster.model.checkpoint import Checkpoint
from cluster.model.layers import Linear
from cluster.model.streams import ENCODE_PRIORITY, new_stream
from cluster.model.weights import TORCH_DTYPES
from encoder_worker.gpu.encoder import Encoder, GpuEncoder
from encoder_worker.gpu.static_encoder import StaticEncoder
from encoder_worker.gpu.whole_window import WholeWindows
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder


def encoder(rig: Rig, clock: Clock, record: Record) -> None:
    """Windows per second by batch and by way into the pages; then where the time goes."""
    for name in rig.sizes.models:
        checkpoint = rig.checkpoint(name)
        parts = _EncoderParts(rig, checkpoint)
        limit = 1 / roofline.encode_s(rig.shape(name), rig.gpu)
        record(f"{name}: roofline, windows/s", limit)
        for way in ("pages of 125", "whole-window pages", "states alone"):
            clock.check()
            static = parts.static(way)
            for batch in rig.sizes.encode_batches:
                windows = [clip(30.0, i) for i in range(batch)]
                pages = parts.pages(way, batch)
                run = _Launches(static, windows, pages)
                seconds = rig.time_s(run, max(1, rig.sizes.encoded // batch))
                rate = batch / seconds
                record(f"{name}, {way}, batch of {batch}: windows/s", rate)
                record(f"{name}, {way}, batch of {batch}: share of roofline", rate / limit)
            del static
        for what, seconds in parts.breakdown(min(8, max(rig.sizes.encode_batches))).items():
            record(f"{name}: {what}, ms per window", 1000 * seconds)
        record(f"{name}: kernels", parts.kernels(max(rig.sizes.encode_batches)))


class _Launches:
    """Launches one batch, again each time it is called."""

    def __init__(
        self, static: StaticEncoder, windows: list[NDArray[Any]], pages: list[list[int]]
    ) -> None:
        self._static, self._windows, self._pages = static, windows, pages

    def __call__(self) -> None:
        self._static(self._windows, self._pages)


class _EncoderParts:
    """The weights of one encoder, and the ways to put them together."""

    def __init__(self, rig: Rig, checkpoint: Checkpoint) -> None:
        self._rig, self._checkpoint = rig, checkpoint
        self._dtype = TORCH_DTYPES[rig.dtype]
        self._largest = max(rig.sizes.encode_batches)
        self.mel = LogMel(checkpoint.dims.n_mels, rig.device)
        plain = AudioEncoder(checkpoint, self._dtype, rig.device)
        # As `WindowEncoder` serves it.
        self.encoder: Encoder = plain
        if rig.device == "cuda" and has_triton():
            self.encoder = GpuEncoder(plain)
        self.projection = CrossKVProjection(checkpoint, self._dtype, rig.device)

    def static(self, way: str) -> StaticEncoder:
        """An encoder with graphs for every batch size, over a pool of its own."""
        output: Any = self.projection
        if way == "states alone":
            dims = self._checkpoint.dims
            shape: tuple[int, ...] = (self._largest, dims.n_audio_ctx, dims.n_audio_state)
            pool, output = as_kv_pool(self._empty(shape)), Unprojected()
        else:
            frames = PAGE_FRAMES if way == "pages of 125" else 1500
            layout = kv_layout(self._checkpoint, frames, self._rig.dtype)
            pool = self._empty((self._largest * layout.pages_per_window, *layout.page_shape))
            if way == "whole-window pages":
                output = self._whole(pool, self._largest)
        stream = new_stream(self._rig.device, ENCODE_PRIORITY)
        return StaticEncoder(self.mel, self.encoder, output, pool, self._largest, stream)

    def pages(self, way: str, batch: int) -> list[list[int]]:
        n = 1500 // PAGE_FRAMES if way == "pages of 125" else 1
        return [list(range(i * n, (i + 1) * n)) for i in range(batch)]

    @torch.inference_mode()
    def breakdown(self, batch: int) -> dict[str, float]:
        """Seconds per window of each part, launched eagerly at this batch."""
        dims = self._checkpoint.dims
        windows = [clip(30.0, i) for i in range(batch)]
        features = self.mel(windows)
        states = self.encoder(features)
        few = states[: min(batch, 4)]
        kv = self.projection.project(few)
        layout = kv_layout(self._checkpoint, PAGE_FRAMES, self._rig.dtype)
        n_pages = layout.pages_per_window
        pool = self._empty((len(few) * n_pages, *layout.page_shape))
        table = torch.arange(len(few) * n_pages, dtype=torch.int32, device=self._rig.device)
        table = table.view(len(few), n_pages)
        page = self._empty((1, *kv_layout(self._checkpoint, 1500, self._rig.dtype).page_shape))
        whole = self._whole(page, 1)
        whole.keep(states[:1])

        d = dims.n_audio_state
        rows, wide = states.flatten(0, 1), self._empty((4 * d, d)).normal_(std=d**-0.5)
        bias = self._empty((4 * d,)).zero_()
        n, per_window = self._rig.sizes.repeats, self._rig.time_s
        times = {
            "log-mel": per_window(lambda: self.mel(windows), n) / batch,
            "encoder": per_window(lambda: self.encoder(features), n) / batch,
            "product": per_window(lambda: self.projection.project(few), n) / len(few),
            "scatter": per_window(lambda: scatter_pages(kv, pool, table), n) / len(few),
            # As it is served, and with what the library's product can take along.
            "a layer's first product, then GELU": per_window(
                lambda: F.gelu(F.linear(rows, wide, bias)), n
            )
            / batch,
            "the same, GELU by tanh within": per_window(
                lambda: torch._addmm_activation(bias, rows, wide.t(), use_gelu=True), n
            )
            / batch,
            "product into a whole-window page": per_window(
                lambda: whole.write([0], dims.n_audio_ctx), n
            ),
        }
        moved = 2 * layout.page_bytes * n_pages
        times["scatter at the copy's bandwidth"] = moved / self._rig.gpu.bytes_per_s
        return times

    def kernels(self, batch: int) -> list[dict[str, Any]]:
        static = self.static("pages of 125")
        windows = [clip(30.0, i) for i in range(batch)]
        pages = self.pages("pages of 125", batch)
        static(windows, pages).wait()
        return profiled(self._rig, lambda: static(windows, pages).wait())

    def _whole(self, pool: Tensor, max_batch: int) -> WholeWindows:
        parts = cross_kv_parts(self._checkpoint, self._dtype, self._rig.device)
        return WholeWindows(Linear.fused(parts), pool, max_batch)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._rig.device)

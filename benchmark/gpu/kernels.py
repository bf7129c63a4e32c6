"""Sections of `benchmark.gpu` below the level of requests: correctness, encoder, decode steps.

Each takes the rig, its clock and `record`, which keeps a row as soon as it is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmark.gpu import roofline
from benchmark.gpu.rig import PATIENCE_S, Clock, Pair, Rig, clip, greedy
from benchmark.gpu.roofline import Work
from cluster.gpu.kernels import has_triton
from cluster.kv.layout_for import kv_layout
from cluster.messages import DecodeRequest, DecodeResult
from cluster.model.checkpoint import Checkpoint
from cluster.model.cross_kv import CrossKVProjection, Unprojected, as_kv_pool, cross_kv_parts
from cluster.model.streams import ENCODE_PRIORITY, new_stream
from cluster.model.weights import TORCH_DTYPES
from encoder_worker.forward import WindowEncoder
from encoder_worker.gpu.encoder import Encoder, GpuEncoder
from encoder_worker.gpu.scatter import scatter_pages
from encoder_worker.gpu.static_encoder import StaticEncoder
from encoder_worker.gpu.whole_window import WholeWindows
from encoder_worker.mel import LogMel
from encoder_worker.model import AudioEncoder

Record = Callable[[str, Any], None]
PAGE_FRAMES = 125
KV_ERROR = 0.03  # of the KV's norm, bfloat16 against float32
LOGPROB_ERROR = 0.15  # of a token, between kernels
STEADY_TOKENS = 200  # of a decode whose steps are timed
TOP_KERNELS = 12


def prepare(rig: Rig, clock: Clock, record: Record) -> None:
    """Write every checkpoint and compile every kind of kernel once, for all sections."""
    for name in ("check", *rig.sizes.models):
        begun = time.perf_counter()
        rig.checkpoint(name)
        record(f"{name}: checkpoint, s", time.perf_counter() - begun)
    with rig.pair("check", max_batch=2, encode_batch=1) as pair:
        record("load, compile and capture, s", pair.prepare_s)
        asyncio.run(pair.transcribe(clip(1.0, 0), 2))


def correct(rig: Rig, clock: Clock, record: Record) -> None:
    """Compare the fast paths with plain ones on a wide, shallow model; raise where they differ."""
    checkpoint = rig.checkpoint("check")
    wrong = _check_encoder(rig, checkpoint, record)
    clock.check()
    wrong += _check_decoder(rig, record)
    record("wrong", wrong)
    if wrong:
        raise RuntimeError("; ".join(wrong))


def _check_encoder(rig: Rig, checkpoint: Checkpoint, record: Record) -> list[str]:
    """Compare graphs in the served dtype with an eager float32 encoder, in uneven batches."""
    n_pages = 1500 // PAGE_FRAMES
    served = kv_layout(checkpoint, PAGE_FRAMES, rig.dtype)
    exact = kv_layout(checkpoint, PAGE_FRAMES, "float32")
    fast = WindowEncoder(checkpoint, rig.dtype, rig.device)
    plain = WindowEncoder(checkpoint, "float32", rig.device)
    wrong: list[str] = []
    largest = max(rig.sizes.encode_batches)
    pool = torch.zeros((largest * n_pages, *served.page_shape), device=rig.device)
    pool = pool.to(TORCH_DTYPES[rig.dtype])
    fast.prepare(pool, largest)
    reference = torch.zeros((largest * n_pages, *exact.page_shape), device=rig.device)
    for n in sorted({1, min(3, largest), min(5, largest), largest}):
        windows = [clip(0.3 + 29.7 * i / max(1, n - 1), i) for i in range(n)]
        order = np.random.default_rng(n).permutation(largest * n_pages).reshape(-1, n_pages)
        pages = order[:n].tolist()
        pool.fill_(float("nan"))
        reference.fill_(float("nan"))
        rig.synchronize()  # encoders write on streams of their own
        fast(windows, pool, pages).wait()
        plain(windows, reference, pages).wait()
        own = torch.tensor(order[:n].flatten(), device=rig.device)
        error = _relative(pool[own], reference[own])
        others = torch.tensor(order[n:].flatten(), device=rig.device)
        outside = bool(pool[others].isnan().all()) if len(others) else True
        record(f"encoder, batch of {n}: relative error", error)
        if not error <= KV_ERROR:
            wrong.append(f"the KV of a batch of {n} differs by {error:.3f} of its norm")
        if not outside:
            wrong.append(f"a batch of {n} wrote outside of its pages")
    return wrong


def _check_decoder(rig: Rig, record: Record) -> list[str]:
    """Compare the served attention, in graphs and batches, with torch's, one sequence at a time."""
    n, n_tokens = max(rig.sizes.decode_batches[:4]), 8
    found: dict[str, list[DecodeResult]] = {}
    choices: tuple[Literal["auto", "torch"], ...] = ("auto", "torch")
    for attention in choices:
        with rig.pair("check", max_batch=n, windows=2 * n, attention=attention) as pair:
            fill_pool(pair)
            handles = publish(pair, n)
            together = attention == "auto"
            if together:
                futures = [submit(pair, handle, n_tokens) for handle in handles]
                found[attention] = [future.result(PATIENCE_S) for future in futures]
            else:
                found[attention] = [
                    submit(pair, handle, n_tokens).result(PATIENCE_S) for handle in handles
                ]
    wrong: list[str] = []
    n_equal, largest = 0, 0.0
    for ours, plain in zip(found["auto"], found["torch"], strict=True):
        n_equal += ours.tokens == plain.tokens
        for a, b, p, q in zip(
            ours.tokens, plain.tokens, ours.token_logprobs, plain.token_logprobs, strict=True
        ):
            largest = max(largest, abs(p - q))
            if a != b:  # two tokens were almost equally likely; what follows is another text
                break
    record("decoder: sequences with equal tokens", f"{n_equal} of {n}")
    if rig.dtype == "float32" and n_equal < n:
        wrong.append(f"only {n_equal} of {n} sequences have equal tokens in float32")
    record("decoder: largest difference of a log probability", largest)
    if largest > LOGPROB_ERROR:
        wrong.append(f"log probabilities differ by {largest:.3f} from torch's attention")
    return wrong


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
        whole = self._whole(pool, self._largest) if way == "whole-window pages" else None
        stream = new_stream(self._rig.device, ENCODE_PRIORITY)
        return StaticEncoder(
            self.mel, self.encoder, output, pool, self._largest, stream, whole=whole
        )

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

        n, per_window = self._rig.sizes.repeats, self._rig.time_s
        times = {
            "log-mel": per_window(lambda: self.mel(windows), n) / batch,
            "encoder": per_window(lambda: self.encoder(features), n) / batch,
            "product": per_window(lambda: self.projection.project(few), n) / len(few),
            "scatter": per_window(lambda: scatter_pages(kv, pool, table), n) / len(few),
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
        return WholeWindows(parts, pool, max_batch)

    def _empty(self, shape: Sequence[int]) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._rig.device)


def decoder(rig: Rig, clock: Clock, record: Record) -> None:
    """Time of a decode step by batch, through the engine, against the bytes that it reads."""
    for name in rig.sizes.models:
        largest = max(rig.sizes.decode_batches)
        with rig.pair(name, max_batch=largest, windows=largest, encode_batch=1) as pair:
            record(f"{name}: load, compile and capture, s", pair.prepare_s)
            fill_pool(pair)
            for batch in rig.sizes.decode_batches:
                clock.check()
                seconds = _step_s(pair, batch)
                limit = roofline.step_s(rig.shape(name), rig.gpu, Work(STEADY_TOKENS, batch))
                record(f"{name}, batch of {batch}: step, ms", 1000 * seconds)
                record(f"{name}, batch of {batch}: roofline, ms", 1000 * limit)
                record(f"{name}, batch of {batch}: tokens/s", batch / seconds)
            batch = min(8, largest)
            kernels = profiled(rig, lambda batch=batch: _step_s(pair, batch))
            record(f"{name}: kernels of {STEADY_TOKENS} steps, batch of {batch}", kernels)


def _step_s(pair: Pair, batch: int) -> float:
    """Seconds of a step while exactly `batch` sequences run: wall time, the host's share too."""
    futures = [submit(pair, handle, STEADY_TOKENS) for handle in publish(pair, batch)]
    first: tuple[float, int] | None = None
    last = first
    while not any(future.done() for future in futures):
        stats = pair.decoder.stats()
        if stats.running == batch:
            last = time.perf_counter(), stats.steps
            first = first or last
        time.sleep(0.0005)
    for future in futures:
        future.result(PATIENCE_S)
    if first is None or last is None or last[1] <= first[1]:
        raise RuntimeError(f"a batch of {batch} was never seen running")
    return (last[0] - first[0]) / (last[1] - first[1])


def fill_pool(pair: Pair) -> None:
    """Random KV in every exported page, the same each time."""
    device = pair.exporter.pool.device
    generator = torch.Generator(device).manual_seed(0)
    for page in pair.exporter.pool.tensor:
        page.copy_(torch.randn(page.shape, device=device, generator=generator))
    if pair.exporter.pool.device.type == "cuda":
        torch.cuda.synchronize()


def publish(pair: Pair, n: int) -> list[Any]:
    """Handles of so many windows, of whatever is in the pool."""
    layout = pair.exporter.layout
    handles = []
    for window in range(n):
        pages = pair.exporter.reserve(layout.pages_per_window, PATIENCE_S)
        assert pages is not None, "the export pool stayed full"
        names = {"request_id": "r", "window": window, "attempt": 0}
        handles.append(pair.exporter.publish(pages, frames=layout.n_frames, **names))
    return handles


def submit(pair: Pair, handle: Any, n_tokens: int) -> Any:
    request = DecodeRequest("r", handle.window, 0, handle, greedy(n_tokens), PATIENCE_S)
    return pair.decoder.submit(request)


def profiled(rig: Rig, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels that took longest while `run` ran, on whichever thread: calls, ms, share."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = rig.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run()
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, time_of))
    total = sum(getattr(row, time_of) for row in rows) or 1.0
    return [
        {
            "kernel": row.key[:80],
            "calls": row.count,
            "ms": round(getattr(row, time_of) / 1000, 3),
            "share": round(getattr(row, time_of) / total, 3),
        }
        for row in rows[:TOP_KERNELS]
    ]


def _relative(ours: Tensor, reference: Tensor) -> float:
    ours = ours.float()
    return float((ours - reference).norm() / reference.norm())

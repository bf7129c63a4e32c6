"""What the sections of `benchmark.gpu` share: models, sizes, and both roles in one process.

Weights are random in published shapes. End-of-text and timestamps are suppressed, so that every
decode has the length that it is asked for. KV moves in memory, as in a colocated worker.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from benchmark.gpu.predicted import H200, Gpu
from benchmark.shared.flops import FRAMES, SHAPES
from cluster.common.kv.connect import make_exporter, make_importer, make_kv_pool
from cluster.common.kv.pool import gpu_budget
from cluster.common.messages import (
    SAMPLE_RATE,
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeRequest,
)
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.settings import DecoderSettings, EncoderSettings, Settings
from decoder_worker import build as decoder_build
from decoder_worker.engine import DecoderEngine
from encoder_worker import sizing as encoder_sizing
from encoder_worker.engine import EncoderEngine
from encoder_worker.gpu.static_encoder import ATTENTION
from tests.support.checkpoints import ModelShape, make_checkpoint, special_tokens

Record = Callable[[str, Any], None]  # a row's name and its figure or figures

KEY = "benchmark" * 4
PATIENCE_S = 120.0
PAGE_FRAMES = 125
TOP_KERNELS = 12  # of a profile
MODELS = {"large-v3": SHAPES["large-v3"], "turbo": SHAPES["large-v3-turbo"]}
SMOKE_MODELS = {"micro": ModelShape(128, 2, 1, 2, n_vocab=2_000, n_languages=4)}  # heads of 64


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    audio_s: float
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Sizes:
    models: dict[str, ModelShape]
    check: ModelShape  # wide and shallow, for correctness
    workloads: tuple[Workload, ...]  # the last one is MLPerf's
    encode_batches: tuple[int, ...]
    decode_batches: tuple[int, ...]
    in_flight: tuple[int, ...]
    rival_batches: tuple[int, ...]  # of Hugging Face's generate
    point_s: float  # of one load point
    encoded: int  # windows in a timed group
    repeats: int  # 1: time one group of runs, not three, and run LoadGen for a second


FULL = Sizes(
    models=MODELS,
    check=replace(SHAPES["large-v3"], encoder_layers=2, decoder_layers=2),
    workloads=(Workload("5 s, 18 tokens", 5.0, 18), Workload("24 s, 64 tokens", 24.0, 64)),
    encode_batches=(1, 2, 4, 8, 16),
    decode_batches=(1, 2, 4, 8, 16, 32, 64, 128),
    in_flight=(1, 8, 32, 64),
    rival_batches=(1, 32),
    point_s=4.0,
    encoded=40,
    repeats=5,
)
SMOKE = Sizes(
    models=SMOKE_MODELS,
    check=SMOKE_MODELS["micro"],
    workloads=(Workload("1 s, 4 tokens", 1.0, 4),),
    encode_batches=(1, 2),
    decode_batches=(1, 2),
    in_flight=(1, 2),
    rival_batches=(2,),
    point_s=0.2,
    encoded=2,
    repeats=1,
)


@dataclass
class Pair:
    checkpoint: Checkpoint
    exporter: Any
    importer: Any
    encoder: EncoderEngine
    decoder: DecoderEngine
    prepare_s: float  # to load, compile and capture

    async def transcribe(self, pcm: NDArray[np.int16], n_tokens: int) -> Served:
        begun = time.perf_counter()
        handle = await self.encode(pcm)
        request = DecodeRequest("r", 0, 0, handle, greedy(n_tokens), PATIENCE_S)
        result = await asyncio.wrap_future(self.decoder.submit(request))
        if len(result.tokens) != n_tokens:
            raise RuntimeError(f"{len(result.tokens)} tokens came of {n_tokens}")
        return Served(begun, time.perf_counter())

    async def encode(self, pcm: NDArray[np.int16]) -> CrossKVHandle:
        """Encode one window; the caller holds the handle's lease."""
        request = EncodeRequest("r", 0, 0, pcm, PATIENCE_S)
        return (await asyncio.wrap_future(self.encoder.submit(request))).handle


@dataclass(frozen=True, slots=True)
class Served:
    begun_s: float
    ended_s: float


class Rig:
    def __init__(self, sizes: Sizes, device: str, folder: Path) -> None:
        self.sizes = sizes
        self.device = device
        self.dtype = "bfloat16" if device == "cuda" else "float32"
        self._folder = folder
        self.gpu = H200  # until `measure_rates`

    def measure_rates(self) -> dict[str, float]:
        """Measure the device's rate for each kind of work, in the shapes of large-v3's encoder."""
        on_gpu = self.device == "cuda"
        d, n, n_bytes = (1280, 8, 4 << 30) if on_gpu else (64, 1, 1 << 20)
        rows, products = FRAMES * n, {}
        for inner, outer in ((d, 4 * d), (4 * d, d)):
            product = partial(F.linear, self._noise(rows, inner), self._noise(outer, inner))
            products[inner] = 2 * rows * inner * outer / self.time_s(product, 10)
        q, k, v = self._noise(3, n, d // 64, FRAMES, 64).unbind(0)
        with sdpa_kernel(ATTENTION, set_priority=True):
            seconds = self.time_s(lambda: F.scaled_dot_product_attention(q, k, v), 10)
        source = torch.randint(255, (n_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        bytes_per_s = 2 * n_bytes / self.time_s(lambda: target.copy_(source), 5)
        attention = 4 * n * FRAMES**2 * d / seconds
        self.gpu = Gpu(products, attention, bytes_per_s)
        found = {f"product of K = {k}, TFLOP/s": flops / 1e12 for k, flops in products.items()}
        return found | {"attention, TFLOP/s": attention / 1e12, "copy, TB/s": bytes_per_s / 1e12}

    def _noise(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(torch.bfloat16)

    def time_s(self, run: Callable[[], Any], n_runs: int) -> float:
        """Return the seconds of one run, the median of three groups of `n_runs`."""
        run()
        groups = []
        for _ in range(3 if self.sizes.repeats > 1 else 1):
            self.synchronize()
            begun = time.perf_counter()
            for _ in range(n_runs):
                run()
            self.synchronize()
            groups.append((time.perf_counter() - begun) / n_runs)
        return statistics.median(groups)

    def profiled(self, run: Callable[[], Any]) -> list[dict[str, Any]]:
        """Return the kernels that took longest while `run` ran, on any thread."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device == "cuda"
        kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        with profile(activities=[kind]) as found:
            run()
        time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        times_ms = [(getattr(row, time_of) / 1000, row) for row in found.key_averages()]
        total_ms = sum(ms for ms, _ in times_ms) or 1.0
        longest = sorted(times_ms, key=lambda pair: -pair[0])[:TOP_KERNELS]
        return [
            {
                "kernel": row.key[:80],
                "calls": row.count,
                "ms": round(ms, 3),
                "share": round(ms / total_ms, 3),
            }
            for ms, row in longest
        ]

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    @functools.cache  # noqa: B019  # one rig for a run
    def checkpoint(self, name: str) -> Checkpoint:
        shape = self.sizes.check if name == "check" else self.sizes.models[name]
        folder = self._folder / name
        done = folder / "done"
        if not done.exists():
            make_checkpoint(folder, shape, dtype="bfloat16", device=self.device)
            file = folder / "generation_config.json"
            config = json.loads(file.read_text())
            special = special_tokens(shape)
            # Timestamps too: Hugging Face would transcribe again from one.
            config["suppress_tokens"] += [special["<|endoftext|>"]]
            config["suppress_tokens"] += range(special["<|0.00|>"], shape.n_vocab)
            file.write_text(json.dumps(config))
            done.touch()
        return open_checkpoint(str(folder))

    def shape(self, name: str) -> ModelShape:
        return self.sizes.models[name]

    @contextmanager
    def pair(
        self,
        name: str,
        *,
        max_batch: int = 64,
        encode_batch: int = 8,
        windows: int = 0,
        attention: Literal["auto", "torch"] = "auto",
        encoder: Mapping[str, Any] | None = None,
        **top: Any,
    ) -> Iterator[Pair]:
        """Open both engines of a model.

        `windows` sizes both pools, 0 by free memory. `encoder` has fields of `EncoderSettings`, and
        `top` of `Settings`.
        """
        begun = time.perf_counter()
        checkpoint = self.checkpoint(name)
        common: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        own = {**common, "max_batch": encode_batch, "export_windows": windows, **(encoder or {})}
        settings = Settings(
            model=str(checkpoint.path),
            transport="memory",
            cluster_key=KEY,
            encoder=EncoderSettings(**own),
            decoder=DecoderSettings(
                max_batch=max_batch,
                max_waiting=1024,
                kv_windows=windows,
                attention=attention,
                **common,
            ),
            **top,
        )
        budget = gpu_budget(self.device)
        settings = encoder_sizing.sized(settings, checkpoint, self.device, budget, 0.25)
        exporter = make_exporter(checkpoint, settings, self.device, "encoder")
        encodes = EncoderEngine(checkpoint, exporter, settings.encoder)
        budget = gpu_budget(self.device)
        settings = decoder_build.sized(settings, checkpoint, self.device, budget)
        importer = make_importer(checkpoint, settings, self.device, "decoder")
        kv_pool = make_kv_pool(checkpoint, settings, self.device)
        decoder = DecoderEngine(checkpoint, importer, settings.decoder, kv_pool=kv_pool)
        prepare_s = time.perf_counter() - begun
        pair = Pair(checkpoint, exporter, importer, encodes, decoder, prepare_s)
        try:
            yield pair
        finally:
            for part in (encodes, decoder, importer, exporter):
                part.close()
            # The caller may still hold the pair while the next one looks for free memory, and
            # engines have reference cycles.
            vars(pair).clear()
            del encodes, decoder, importer, exporter, kv_pool, part
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()


def greedy(n_tokens: int) -> DecodeOptions:
    return DecodeOptions(language="en", timestamps=False, max_new_tokens=n_tokens)


@functools.cache
def _recording() -> NDArray[np.int16]:
    """Make two minutes of tones over noise; the content makes no difference to speed."""
    rng = np.random.default_rng(0)
    t = np.arange(120 * SAMPLE_RATE) / SAMPLE_RATE
    tone = np.sin(2 * np.pi * (150 * t + 30 * np.sin(2 * np.pi * 0.7 * t)))
    signal = 0.2 * tone * np.clip(np.sin(2 * np.pi * 3 * t), 0, None)
    return (32_767 * (signal + 0.01 * rng.standard_normal(t.shape))).astype(np.int16)


def clip(seconds: float, seed: int) -> NDArray[np.int16]:
    whole, n = _recording(), round(seconds * SAMPLE_RATE)
    begin = np.random.default_rng(seed).integers(0, len(whole) - n)
    return whole[begin : begin + n].copy()

"""Both roles' engines on one simulated GPU, from samples to texts, under the race detector."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.memory_wire import MemoryWire
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import Descriptor, TransferConfig
from cluster.common.messages import DecodeOptions, DecodeRequest, EncodeRequest
from cluster.common.model import streams
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import DecoderSettings, EncoderSettings
from decoder_worker.engine import DecoderEngine
from encoder_worker.engine import EncoderEngine
from tests.support.checkpoints import SHAPES, cached_checkpoint
from tests.support.gpu.device import SimulatedGpu
from tests.support.gpu.fences import Fence
from tests.support.gpu.flashinfer import simulated_flashinfer
from tests.support.gpu.operations import Kind, Operation, where_now
from tests.support.gpu.races import RaceDetector
from tests.support.gpu.runtime import SimulatedRuntime, simulated_gpu
from tests.support.references.hugging_face import make_pcm

Placement = Literal["colocated", "split"]
Handoff = Literal["cross_kv", "encoder_states"]

KEY = b"k" * 32
ANSWER_S = 100.0
PAGE_FRAMES = 750
PAGE_TOKENS = 8  # rows begin pages often, so that plans follow one another
EXPORT_WINDOWS, KV_WINDOWS = 3, 4  # fewer than the windows: pages are used again

WINDOWS: tuple[dict[str, Any], ...] = (
    {"timestamps": False},
    {"timestamps": True},
    {"language": None},
    {"beam_size": 2, "max_new_tokens": 6},
    {"prompt_tokens": tuple(range(30)), "max_new_tokens": 12},
    {"temperatures": (0.6,)},
    {"words": True, "max_new_tokens": 8},
)


class OtherProcess:
    """Reads a pool as another process does, over NIXL: in no stream's order, only the host's."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def wire(self, config: TransferConfig) -> MemoryWire:
        gpu = self._gpu

        class Wire(MemoryWire):
            def _copy_pages(self, peer: MemoryWire, descs: Sequence[Descriptor]) -> None:
                with gpu.in_kernel():
                    super()._copy_pages(peer, descs)
                for desc in descs:
                    n_pages = desc.n_bytes // self._pool.page_bytes
                    here = self._pool.page_at(desc.local)
                    there = peer._pool.page_at(desc.remote)
                    source = peer._pool.tensor[there : there + n_pages]
                    target = self._pool.tensor[here : here + n_pages]
                    gpu.tell(Operation("READ", Kind.HOST, where_now(), (source,), (target,)))

        return Wire(config)


@dataclass
class OneGpu:
    """Both roles' engines, and where windows lie between them."""

    encoder: EncoderEngine
    decoder: DecoderEngine
    exporter: KVExporter

    def transcribe(self, windows: Sequence[dict[str, Any]] = WINDOWS) -> list[tuple[int, ...]]:
        """The tokens of windows that are sent at once."""
        encodes = [
            self.encoder.submit(EncodeRequest("r", i, 0, make_pcm(0.5 + 3.0 * i, seed=i), ANSWER_S))
            for i in range(len(windows))
        ]
        decodes = []
        for i, (encode, options) in enumerate(zip(encodes, windows, strict=True)):
            handle = encode.result(ANSWER_S).handle
            chosen = DecodeOptions(**{"language": "en", "max_new_tokens": 24, **options})
            request = DecodeRequest("r", i, 0, handle, chosen, ANSWER_S)
            decodes.append(self.decoder.submit(request))
        return [decode.result(ANSWER_S).tokens for decode in decodes]


@dataclass
class Outcome:
    """races: each once. passed: the fences that the product came to. tokens: of each window."""

    races: dict[str, None] = field(default_factory=dict)
    passed: set[Fence] = field(default_factory=set)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.races)


@cache
def checkpoint_folder() -> Path:
    """A small model whose heads are of a size that flashinfer has kernels for."""
    SHAPES.setdefault("micro-64", replace(SHAPES["micro"], d_model=128))
    return cached_checkpoint("micro-64")


@contextmanager
def engines(
    device: str,
    dtype: str = "bfloat16",
    handoff: Handoff = "cross_kv",
    placement: Placement = "colocated",
    gpu: SimulatedGpu | None = None,
    page_frames: int = PAGE_FRAMES,
) -> Iterator[OneGpu]:
    checkpoint = open_checkpoint(str(checkpoint_folder()))
    with ExitStack() as stack:
        remote = OtherProcess(gpu) if gpu is not None and placement == "split" else None
        kv = kv_layout(checkpoint, page_frames, dtype, device)
        states = states_layout(checkpoint, dtype)

        def config(name: str) -> TransferConfig:
            return TransferConfig(KEY, name, "memory", device=device)

        exported: PageLayout = kv if handoff == "cross_kv" else states
        one = config("encoder")
        exporter = KVExporter(
            exported, EXPORT_WINDOWS * exported.pages_per_window, one, MemoryWire(one)
        )
        stack.callback(exporter.close)
        one = config("decoder")
        wire = MemoryWire(one) if remote is None else remote.wire(one)
        n_pages = KV_WINDOWS * kv.pages_per_window
        importer = KVImporter(exported, n_pages if exported is kv else 2, one, wire)
        stack.callback(importer.close)
        kv_pool = None if exported is kv else PagePool(kv, n_pages, device)
        role: dict[str, Any] = {"device": device, "dtype": dtype, "threads": 1}
        encoder = EncoderEngine(checkpoint, exporter, EncoderSettings(**role, max_batch=2))
        stack.callback(encoder.close)
        decoder = DecoderEngine(
            checkpoint,
            importer,
            DecoderSettings(**role, max_batch=2, kv_windows=KV_WINDOWS),
            kv_pool=kv_pool,
            page_tokens=PAGE_TOKENS,
        )
        stack.callback(decoder.close)
        yield OneGpu(encoder, decoder, exporter)


def run_one_gpu(
    handoff: Handoff = "cross_kv",
    placement: Placement = "colocated",
    without: Fence | None = None,
    windows: Sequence[dict[str, Any]] = WINDOWS,
    page_frames: int = PAGE_FRAMES,
) -> Outcome:
    """Transcribe some windows; `without` a fence of the product."""
    checkpoint_folder()
    with simulated_one_gpu(without) as (gpu, runtime):
        detector = RaceDetector(gpu, runtime)
        where = {"handoff": handoff, "placement": placement}
        with engines("cuda", gpu=gpu, page_frames=page_frames, **where) as both:
            tokens = both.transcribe(windows)
        return Outcome(detector.races, runtime.passed, tokens)


@contextmanager
def simulated_one_gpu(
    without: Fence | None = None, values: str = "cpu"
) -> Iterator[tuple[SimulatedGpu, SimulatedRuntime]]:
    """A simulated GPU for which flashinfer and Triton are installed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            simulated_gpu(values, without) as (gpu, runtime),
            simulated_flashinfer(gpu),
            patch("encoder_worker.forward.has_triton", lambda: True),
            patch("decoder_worker.backends.has_triton", lambda: True),
            patch.object(streams, "WARM_UPS", 1),
            patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)),
        ):
            yield gpu, runtime
    finally:
        torch.set_num_threads(threads)

"""Both roles' engines on one simulated GPU, from samples to texts, under the race detector."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from cluster.common.kernels.gpu import kernels, self_check
from cluster.common.kv.connect import kv_layout, states_layout
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
from tests.support.gpu.fake_flashinfer import installed
from tests.support.gpu.flashinfer import flashinfer_on
from tests.support.gpu.operations import Kind, Operation, where_now
from tests.support.gpu.races import RaceDetector
from tests.support.gpu.runtime import SimulatedRuntime, simulated_gpu
from tests.support.kv.ends import MemoryExporter
from tests.support.references.hugging_face import make_pcm

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


class RemoteWire(MemoryWire):
    """Reads a pool as another process does, over NIXL: in no stream's order, only the host's."""

    gpu: SimulatedGpu

    def _copy_pages(self, peer: MemoryWire, descs: Sequence[Descriptor]) -> None:
        with self.gpu.in_kernel():
            super()._copy_pages(peer, descs)
        for desc in descs:
            n_pages = desc.n_bytes // self._pool.page_bytes
            here, there = self._pool.page_at(desc.local), peer._pool.page_at(desc.remote)
            source = peer._pool.tensor[there : there + n_pages]
            target = self._pool.tensor[here : here + n_pages]
            self.gpu.tell(Operation("READ", Kind.HOST, where_now(), (source,), (target,)))


@dataclass
class Outcome:
    """races: each once. waits: where the host waited in a copy. tokens: of each window."""

    races: dict[str, None] = field(default_factory=dict)
    waits: dict[str, None] = field(default_factory=dict)
    tokens: list[tuple[int, ...]] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(self.races)


@cache
def checkpoint_folder() -> Path:
    SHAPES.setdefault("micro-64", replace(SHAPES["micro"], d_model=128))
    return cached_checkpoint("micro-64")


def run_one_gpu(
    handoff: Literal["cross_kv", "encoder_states"] = "cross_kv",
    placement: Literal["colocated", "split"] = "colocated",
    windows: Sequence[dict[str, Any]] = WINDOWS,
    page_frames: int = PAGE_FRAMES,
) -> Outcome:
    checkpoint = open_checkpoint(str(checkpoint_folder()))
    role: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "threads": 1, "max_batch": 2}
    with ExitStack() as stack:
        gpu, runtime = stack.enter_context(simulated_one_gpu())
        detector = RaceDetector(gpu, runtime)
        kv = kv_layout(checkpoint, page_frames, "bfloat16", "cuda")
        states = states_layout(checkpoint, "bfloat16")
        exported: PageLayout = kv if handoff == "cross_kv" else states
        exporter = MemoryExporter(
            exported, EXPORT_WINDOWS * exported.pages_per_window, cluster_key=KEY, device="cuda"
        )
        stack.callback(exporter.close)
        config = TransferConfig(KEY, "decoder", "memory", device="cuda")
        wire = MemoryWire(config)
        if placement == "split":
            wire = RemoteWire(config)
            wire.gpu = gpu
        n_pages = KV_WINDOWS * kv.pages_per_window
        importer = KVImporter(exported, n_pages if exported is kv else 2, config, wire)
        stack.callback(importer.close)
        encoder = EncoderEngine(checkpoint, exporter, EncoderSettings(**role))
        stack.callback(encoder.close)
        decoder = DecoderEngine(
            checkpoint,
            importer,
            DecoderSettings(**role, kv_windows=KV_WINDOWS),
            kv_pool=None if exported is kv else PagePool(kv, n_pages, "cuda"),
            page_tokens=PAGE_TOKENS,
        )
        stack.callback(decoder.close)
        outcome = Outcome(detector.races)

        def note(operation: Operation) -> None:
            if operation.blocking:
                outcome.waits[operation.where] = None

        gpu.watchers.append(note)
        encodes = [
            encoder.submit(EncodeRequest("r", i, 0, make_pcm(0.5 + 3.0 * i, seed=i), ANSWER_S))
            for i in range(len(windows))
        ]
        decodes = []
        for i, (encode, options) in enumerate(zip(encodes, windows, strict=True)):
            handle = encode.result(ANSWER_S).handle
            chosen = DecodeOptions(**{"language": "en", "max_new_tokens": 24, **options})
            request = DecodeRequest("r", i, 0, handle, chosen, ANSWER_S)
            decodes.append(decoder.submit(request))
        outcome.tokens = [decode.result(ANSWER_S).tokens for decode in decodes]
        return outcome


@contextmanager
def simulated_one_gpu(
    values: str = "cpu",
) -> Iterator[tuple[SimulatedGpu, SimulatedRuntime]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            simulated_gpu(values) as (gpu, runtime),
            installed(flashinfer_on(gpu)),
            patch.dict(self_check.turned_off, clear=True),
            patch.object(kernels, "loads_triton", lambda: True),
            _nothing_is_found(values),
            patch.object(streams, "WARM_UPS", 1),
            patch.object(torch.cuda, "get_device_capability", lambda: (9, 0)),
        ):
            yield gpu, runtime
            assert not self_check.turned_off
    finally:
        torch.set_num_threads(threads)


def _nothing_is_found(values: str) -> AbstractContextManager[Any]:
    if values == "cpu":
        return nullcontext()

    def only_capture(way: str, compute: Callable[[], Any], plain: Callable[[], Any]) -> str:
        if plain is list:  # there is nothing to compare with
            compute()
        return ""

    return patch.object(self_check, "_fault", only_capture)

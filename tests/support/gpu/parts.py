"""Parts of the GPU path alone on a simulated GPU, driven harder than the loops drive them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.pool import PagePool
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.streams import new_stream, on_stream, synchronize
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.states import Projected, StatesProjection
from encoder_worker.forward import WindowEncoder
from tests.support.gpu.fences import Fence
from tests.support.gpu.one_gpu import (
    PAGE_FRAMES,
    WINDOWS,
    Outcome,
    checkpoint_folder,
    run_one_gpu,
    simulated_one_gpu,
)
from tests.support.gpu.races import RaceDetector
from tests.support.gpu.tensor import CUDA
from tests.support.references.hugging_face import make_pcm


@contextmanager
def watched(without: Fence | None) -> Iterator[Outcome]:
    outcome = Outcome()
    with simulated_one_gpu(without) as (gpu, runtime):
        outcome.races = RaceDetector(gpu, runtime).races
        yield outcome
        outcome.passed = runtime.passed


def batches_without_waits(without: Fence | None = None) -> Outcome:
    """Four batches of the encoder's graphs, of which nobody waits for any."""
    with watched(without) as outcome:
        encoder, pool = _encoder()
        encoder.prepare(pool, 1)
        for i in range(4):
            encoder([make_pcm(1.0 + i)], pool, [(2 * i, 2 * i + 1)])
    return outcome


def encoder_without_graphs(without: Fence | None = None) -> Outcome:
    """A batch where Triton does not load."""
    with watched(without) as outcome, patch("encoder_worker.forward.has_triton", lambda: False):
        encoder, pool = _encoder()
        encoder.prepare(pool, 1)
        encoder([make_pcm(1.0)], pool, [(0, 1)]).wait()
    return outcome


def _encoder() -> tuple[WindowEncoder, Tensor]:
    checkpoint = open_checkpoint(str(checkpoint_folder()))
    layout = kv_layout(checkpoint, PAGE_FRAMES, "bfloat16", "cuda")
    pool = PagePool(layout, 8, "cuda").tensor
    return WindowEncoder(checkpoint, "bfloat16", "cuda"), pool


def ragged_plans(without: Fence | None = None) -> Outcome:
    """Two plans of one table for any forward, one right after the other."""
    return _plans(without, lambda kernels: kernels.ragged())


def step_plans(without: Fence | None = None) -> Outcome:
    """The same of a table for decode steps, the rows having begun other pages."""
    return _plans(without, lambda kernels: kernels.fixed(2, 1))


def _plans(without: Fence | None, choose: Callable[[Any], AttentionBackend]) -> Outcome:
    with watched(without) as outcome:
        from decoder_worker.attention.flashinfer_backend import FlashInfer

        pools = [torch.zeros(8, 1, 2, 8, 2, 64, dtype=torch.bfloat16, device=CUDA) for _ in "ab"]
        backend = choose(FlashInfer(*pools))
        synchronize(CUDA)
        with on_stream(new_stream(CUDA)):
            for pages in ((0, 1), (2, 3), (4, 5)):
                table = PagedKV.make([1, 1], [pages, (6, 7)], [9, 12], 8)
                backend.plan(AttentionBatch(table, table))
    return outcome


def states_projected(without: Fence | None = None) -> Outcome:
    """The KV of states that landed is read on another stream, after the projection was awaited."""
    return _projected(without, Projected.wait)


def states_found_projected(without: Fence | None = None) -> Outcome:
    """The same, once it was found done."""
    return _projected(without, Projected.is_done)


def _projected(without: Fence | None, until: Callable[[Projected], object]) -> Outcome:
    with watched(without) as outcome:
        checkpoint = open_checkpoint(str(checkpoint_folder()))
        kv = PagePool(kv_layout(checkpoint, PAGE_FRAMES, "bfloat16", "cuda"), 4, "cuda")
        landing = PagePool(states_layout(checkpoint, "bfloat16"), 2, "cuda")
        landing.tensor.zero_()
        projection = StatesProjection(checkpoint, landing, kv)
        handle = CrossKVHandle("r", 0, 0, "agent", b"", "", (), 0, 1500, 0, 0, "lease", 1.0)
        sequence = DecodeSequence(
            DecodeRequest("r", 0, 0, handle, DecodeOptions(), 1.0),
            Future(),
            arrived=0.0,
            deadline=1.0,
            n_new_max=1,
            language="en",
            cross_pages=(0, 1),
            landing_pages=(1,),
        )
        (projected,) = projection.project([sequence])
        until(projected)
        with on_stream(new_stream(CUDA)):
            kv.tensor[:2].sum()
    return outcome


def colocated(without: Fence | None = None) -> Outcome:
    windows = WINDOWS if without is None else WINDOWS[:3]  # a race shows in the first ones
    return run_one_gpu("cross_kv", "colocated", without, windows)


def colocated_states() -> Outcome:
    return run_one_gpu("encoder_states", "colocated")


def colocated_whole_pages() -> Outcome:
    """The encoder's products write to pages that hold a window each."""
    return run_one_gpu(page_frames=1500)


def split() -> Outcome:
    return run_one_gpu("cross_kv", "split")


def split_states() -> Outcome:
    return run_one_gpu("encoder_states", "split")


Scenario = Callable[..., Outcome]

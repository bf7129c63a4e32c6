"""Nothing on a GPU is read or written before what it has to come after, in any placement.

The product's own engines run on a simulated GPU (`tests/support/gpu`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from cluster.common.kernels.gpu import operators
from cluster.common.kernels.gpu.self_check import KERNELS, turned_off
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.pool import PagePool
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.streams import new_stream, on_stream, synchronize
from decoder_worker import model_runner
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.gpu.fixed_sizes import FixedSizes
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.states import Projected, StatesProjection
from encoder_worker.forward import WindowEncoder
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

ROOT = Path(__file__).parents[3]
Scenario = Callable[[], Outcome]


# Parts of the GPU path alone, driven harder than the loops drive them.


@contextmanager
def watched() -> Iterator[Outcome]:
    outcome = Outcome()
    with simulated_one_gpu() as (gpu, runtime):
        outcome.races = RaceDetector(gpu, runtime).races
        yield outcome


def batches_without_waits() -> Outcome:
    """Four batches of the encoder's graphs, of which nobody waits for any."""
    with watched() as outcome:
        encoder, pool = _encoder()
        encoder.prepare(pool, 1)
        for i in range(4):
            encoder([make_pcm(1.0 + i)], pool, [(2 * i, 2 * i + 1)])
    return outcome


def encoder_without_graphs() -> Outcome:
    """A batch where Triton does not load."""
    with watched() as outcome, patch("encoder_worker.forward.has_triton", lambda: False):
        encoder, pool = _encoder()
        encoder.prepare(pool, 1)
        encoder([make_pcm(1.0)], pool, [(0, 1)])()
    return outcome


def _encoder() -> tuple[WindowEncoder, Tensor]:
    checkpoint = open_checkpoint(str(checkpoint_folder()))
    layout = kv_layout(checkpoint, PAGE_FRAMES, "bfloat16", "cuda")
    pool = PagePool(layout, 8, "cuda").tensor
    return WindowEncoder(checkpoint, "bfloat16", "cuda"), pool


def ragged_plans() -> Outcome:
    """Two plans of one table for any forward, one right after the other."""
    return _plans(lambda kernels: kernels.ragged())


def step_plans() -> Outcome:
    """The same of a table for decode steps, the rows having begun other pages."""
    return _plans(lambda kernels: kernels.fixed(2, 1))


def _plans(choose: Callable[[Any], AttentionBackend]) -> Outcome:
    with watched() as outcome:
        from decoder_worker.attention.flashinfer_backend import FlashInfer

        pools = [torch.zeros(8, 1, 2, 8, 2, 64, dtype=torch.bfloat16, device=CUDA) for _ in "ab"]
        backend = choose(FlashInfer(*pools))
        synchronize(CUDA)
        with on_stream(new_stream(CUDA)):
            for pages in ((0, 1), (2, 3), (4, 5)):
                table = PagedKV.make([1, 1], [pages, (6, 7)], [9, 12], 8)
                backend.plan(AttentionBatch(table, table))
    return outcome


def states_projected() -> Outcome:
    """The KV of states that landed is read on another stream, after the projection was awaited."""
    return _projected(Projected.wait)


def states_found_projected() -> Outcome:
    """The same, once it was found done."""
    return _projected(Projected.is_done)


def _projected(until: Callable[[Projected], object]) -> Outcome:
    with watched() as outcome:
        checkpoint = open_checkpoint(str(checkpoint_folder()))
        kv = PagePool(kv_layout(checkpoint, PAGE_FRAMES, "bfloat16", "cuda"), 4, "cuda")
        landing = PagePool(states_layout(checkpoint, "bfloat16"), 2, "cuda")
        landing.tensor.zero_()
        projection = StatesProjection(checkpoint, landing, kv)
        handle = CrossKVHandle("r", 0, 0, "agent", b"", "", (), 0, 1500, 0, 0, "lease", 1.0)
        sequence = DecodeSequence(
            DecodeRequest("r", 0, 0, handle, DecodeOptions(), 1.0),
            Future(),
            arrived_s=0.0,
            deadline_s=1.0,
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


def test_a_decoder_that_projects_looks_at_the_scatter() -> None:
    """As the encoder does where KV travels."""
    right = operators._scatter_pages

    def wrong(kv: Tensor, pool: Tensor, table: Tensor) -> None:
        right(kv, pool if pool.device.type == "cpu" else pool.clone(), table)

    with patch.object(operators, "_scatter_pages", wrong), watched():
        checkpoint = open_checkpoint(str(checkpoint_folder()))
        kv = PagePool(kv_layout(checkpoint, PAGE_FRAMES, "bfloat16", "cuda"), 4, "cuda")
        landing = PagePool(states_layout(checkpoint, "bfloat16"), 2, "cuda")
        StatesProjection(checkpoint, landing, kv)
        assert list(turned_off) == [KERNELS]
        turned_off.clear()


WHOLE: dict[str, dict[str, Any]] = {
    "colocated, pages that hold a window each": {"page_frames": 1500},
    "colocated, encoder states": {"handoff": "encoder_states"},
    "split": {"placement": "split"},
    "split, encoder states": {"placement": "split", "handoff": "encoder_states"},
}


def test_streams_and_waits_are_asked_for_in_one_place() -> None:
    """Past `common.model.streams` neither this detector nor the check of captures sees them."""
    names = {"Stream", "Event", "stream", "synchronize", "current_stream", "default_stream"}
    names |= {"CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"}
    packages = ("cluster", "encoder_worker", "decoder_worker")
    files = [file for package in packages for file in (ROOT / package).rglob("*.py")]
    for path in files:
        if path.name == "streams.py":
            continue
        for called in re.findall(r"torch\.cuda\.(\w+)\(", path.read_text(encoding="utf-8")):
            assert called not in names, f"{path.relative_to(ROOT)}: torch.cuda.{called}"


PARTS = (
    batches_without_waits,
    encoder_without_graphs,
    ragged_plans,
    states_projected,
    states_found_projected,
)


@pytest.mark.parametrize(
    "scenario",
    [step_plans, *(pytest.param(each, marks=pytest.mark.slow) for each in PARTS)],
    ids=lambda scenario: scenario.__name__,
)
def test_parts_of_the_product_have_no_races(scenario: Scenario) -> None:
    outcome = scenario()
    assert not outcome.races, str(outcome)


@cache
def usual_tokens() -> list[tuple[int, ...]]:
    outcome = run_one_gpu()
    assert not outcome.races, str(outcome)
    return outcome.tokens


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_launch_of_a_window_waits_for_the_device() -> None:
    """Not even of words: else the device has nothing to do until the host has launched more."""
    outcome = run_one_gpu(windows=WINDOWS[-1:])
    assert not outcome.waits
    assert not outcome.races, str(outcome)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", WHOLE)
def test_no_placement_and_no_hand_off_has_races_and_all_give_the_same_texts(how: str) -> None:
    outcome = run_one_gpu(**WHOLE[how])
    assert not outcome.races, str(outcome)
    assert outcome.tokens == usual_tokens()


@pytest.mark.slow
def test_buckets_made_after_the_only_synchronisation_are_found() -> None:
    """As they once were: filled on the default stream, and then used on the runner's own."""

    def make(*args: object) -> FixedSizes:
        synchronize(CUDA)
        return FixedSizes(*args)  # type: ignore[arg-type]

    with (
        patch.object(model_runner, "FixedSizes", make),
        patch.object(model_runner, "synchronize", lambda device: None),
    ):
        outcome = run_one_gpu(windows=WINDOWS[:1])
    races = [race for race in outcome.races if "_make_bucket" in race]
    assert races, str(outcome)
    assert all("the default stream" in race for race in races)

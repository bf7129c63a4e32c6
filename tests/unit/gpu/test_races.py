"""Nothing on a GPU is read or written before what it has to come after, in any placement.

The product's own engines run on a simulated GPU (`tests/support/gpu`). Each place where the product
waits is taken out in turn, and must be missed; one that is new has to be entered here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import pytest
import torch

from cluster.common.model.streams import new_event, new_stream, on_stream, pinned, synchronize
from decoder_worker import model_runner
from decoder_worker.gpu.fixed_sizes import FixedSizes
from tests.support.gpu import parts
from tests.support.gpu.fences import PACKAGES, SEAM, Fence, fences
from tests.support.gpu.one_gpu import WINDOWS, Outcome, run_one_gpu
from tests.support.gpu.operations import ROOT
from tests.support.gpu.parts import Scenario
from tests.support.gpu.races import RaceDetector
from tests.support.gpu.runtime import simulated_gpu
from tests.support.gpu.tensor import CUDA

STAGING = "encoder_worker/gpu/staging.py Staging"
TABLES = "decoder_worker/attention/flashinfer_tables.py"
RUNNER = "decoder_worker/model_runner.py ModelRunner"
FORWARD = "encoder_worker/forward.py WindowEncoder"
PROJECTION = "decoder_worker/states.py"
STATIC = "encoder_worker/gpu/static_encoder.py"

# What misses each fence: parts of the product where they suffice, else both engines at work.
MISSED_BY: dict[str, Scenario] = {
    f"{STAGING}.put: synchronize": parts.batches_without_waits,
    f"{STAGING}._upload: wait_event": parts.batches_without_waits,
    f"{STAGING}._upload: wait_event (2)": parts.batches_without_waits,
    f"{STATIC} StaticEncoder.__init__: synchronize": parts.batches_without_waits,
    f"{FORWARD}.__call__: wait_stream": parts.encoder_without_graphs,
    f"{TABLES} Table.plan: synchronize": parts.step_plans,
    f"{STATIC} EventReady.wait: synchronize": parts.colocated,
    "cluster/common/kv/memory_wire.py MemoryWire._copy_pages: synchronize": parts.colocated,
    "decoder_worker/readback.py Readback.wait: synchronize": parts.colocated,
    f"{RUNNER}.__init__: synchronize": parts.colocated,
    f"{RUNNER}.__init__: synchronize (2)": parts.colocated,
    f"{PROJECTION} StatesProjection.__init__: synchronize": parts.states_projected,
    f"{PROJECTION} Projected.wait: synchronize": parts.states_projected,
    f"{PROJECTION} Projected.is_done: has_come": parts.states_found_projected,
}
WHOLE = (
    parts.colocated,
    parts.colocated_states,
    parts.colocated_whole_pages,
    parts.split,
    parts.split_states,
)


def test_every_fence_of_the_product_is_taken_out_by_a_test() -> None:
    found = {str(fence) for fence in fences()}
    assert found == set(MISSED_BY), (
        "enter a new wait of the product in MISSED_BY, with what misses it"
    )


def test_streams_and_waits_are_asked_for_in_one_place() -> None:
    """Past `common.model.streams` neither this detector nor the check of captures sees them."""
    names = {"Stream", "Event", "stream", "synchronize", "current_stream", "default_stream"}
    names |= {"CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if str(path.relative_to(ROOT)) == SEAM:
                continue
            for called in re.findall(r"torch\.cuda\.(\w+)\(", path.read_text(encoding="utf-8")):
                assert called not in names, f"{path}: torch.cuda.{called} belongs into {SEAM}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", MISSED_BY)
def test_without_a_fence_there_is_a_race(name: str) -> None:
    (fence,) = (fence for fence in fences() if str(fence) == name)
    assert MISSED_BY[name](fence).races, f"nothing misses {name}: is it needed?"


@pytest.mark.parametrize(
    "scenario",
    [
        parts.step_plans,
        *(
            pytest.param(scenario, marks=pytest.mark.slow)
            for scenario in (
                parts.batches_without_waits,
                parts.encoder_without_graphs,
                parts.ragged_plans,
                parts.states_projected,
                parts.states_found_projected,
            )
        ),
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_parts_of_the_product_have_no_races(scenario: Scenario) -> None:
    outcome = scenario()
    assert not outcome.races, str(outcome)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_both_roles_on_one_gpu_have_no_races() -> None:
    outcome = run_one_gpu(windows=WINDOWS[:2])
    assert not outcome.races, str(outcome)
    assert all(outcome.tokens)


@cache
def outcome_of(scenario: Scenario) -> Outcome:
    return scenario()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scenario", WHOLE, ids=lambda scenario: scenario.__name__)
def test_no_placement_and_no_hand_off_has_races_and_all_give_the_same_texts(
    scenario: Scenario,
) -> None:
    outcome = outcome_of(scenario)
    assert not outcome.races, str(outcome)
    assert outcome.tokens == outcome_of(parts.colocated).tokens


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


# The detector itself, on a few lines each.


@contextmanager
def detector() -> Iterator[RaceDetector]:
    with simulated_gpu() as (gpu, runtime):
        yield RaceDetector(gpu, runtime)


def test_a_read_on_another_stream_has_to_wait_for_the_write() -> None:
    with detector() as found:
        first, second, done = new_stream(CUDA), new_stream(CUDA), new_event()
        with on_stream(first):
            x = torch.zeros(4, device=CUDA)
            done.record()
        with on_stream(second):
            x + 1
            assert len(found.races) == 1
            assert f"{__name__.split('.')[-1]}.py" in str(found)
            assert second is not None
            second.wait_event(done)
            x + 1
        assert len(found.races) == 1


def test_a_write_has_to_wait_for_reads_as_well() -> None:
    with detector() as found:
        x, other = torch.zeros(4, device=CUDA), new_stream(CUDA)
        synchronize(CUDA)
        x + 1
        with on_stream(other):
            x.zero_()
        assert "not after it is read by the default stream" in str(found)


def test_rows_are_told_apart() -> None:
    with detector() as found:
        x, other = torch.zeros(4, 8, device=CUDA), new_stream(CUDA)
        synchronize(CUDA)
        x[1].fill_(1)
        with on_stream(other):
            x[2].fill_(1)
            x[torch.tensor([0, 3], device=CUDA)]
            assert not found.races
            x[1:].sum()
        assert len(found.races) == 1


def test_the_host_has_to_wait_before_it_touches_pinned_memory() -> None:
    with detector() as found:
        host, device = pinned([1.0, 2.0], torch.float32), torch.zeros(2, device=CUDA)
        device.copy_(host, non_blocking=True)
        host.numpy()[0] = 3.0
        assert len(found.races) == 1
        synchronize(CUDA)
        host.tolist()
        assert len(found.races) == 1


def test_freed_memory_must_not_be_in_use_on_a_stream_that_its_allocator_does_not_know() -> None:
    with detector() as found:
        x, other = torch.zeros(4, device=CUDA), new_stream(CUDA)
        synchronize(CUDA)
        with on_stream(other):
            x + 1
        del x
        assert "is free for the default stream" in str(found)


def test_a_fence_keeps_its_name_when_lines_move() -> None:
    assert all(isinstance(fence, Fence) and fence.nth >= 1 for fence in fences())
    assert len({str(fence) for fence in fences()}) == len(fences())

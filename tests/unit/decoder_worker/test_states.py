"""Encoder states that land give what their KV gives, and every page of both pools comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cluster.common.errors import SequenceFailedError
from cluster.common.kv import cross_kv
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.cross_kv import CrossKVProjection, is_packed
from cluster.common.kv.pool import PagePool
from cluster.common.messages import DecodeResult, QualityGates
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.kv_scales import kv_scales
from decoder_worker.states import StatesProjection
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import (
    ANSWER_S,
    Stand,
    assert_same,
    make_stand,
    random_states,
    wait_until,
)

# Windows that differ in what they ask for, in the order of their seeds.
REQUESTS: tuple[dict[str, Any], ...] = (
    {},
    {"language": None, "max_new_tokens": 30},
    {"temperatures": (0.8,), "words": True},
    {"prompt_tokens": tuple(range(40)), "beam_size": 2},
)


@pytest.fixture
def stand() -> Iterator[Stand]:
    with make_stand(cached_checkpoint(), reads_states=True, max_batch=2, kv_windows=2) as made:
        yield made
        made.assert_all_returned()
        assert made.importer.pool.n_used == 0


def projection_of(stand: Stand) -> StatesProjection:
    found = stand.engine._loop._landing._projection
    assert found is not None
    return found


def content(result: DecodeResult) -> tuple[Any, ...]:
    return (result.tokens, result.language, result.alignment)


@pytest.mark.parametrize(
    "options",
    [{}, {"page_frames": 100, "page_tokens": 16}, {"kv_dtype": "float8_e4m3fn", "page_frames": 50}],
)
def test_states_give_what_their_kv_gives(options: dict[str, Any]) -> None:
    requests = [{"seed": seed, **each} for seed, each in enumerate(REQUESTS)]
    expected = []
    with make_stand(cached_checkpoint(), **options) as of_kv:
        scales = kv_scales(of_kv.checkpoint, of_kv.importer.pool.tensor.dtype)
        projection = CrossKVProjection(of_kv.checkpoint, scales=scales)
        for seed, each in enumerate(REQUESTS):
            with torch.inference_mode():
                kv = projection.project(random_states(of_kv.checkpoint, seed)[None])[0]
            expected.append(content(of_kv.decode(seed, handle=of_kv.publish(seed, kv), **each)))
    with make_stand(cached_checkpoint(), reads_states=True, **options) as stand:
        alone = [stand.decode(**each) for each in requests]
        assert [content(result) for result in alone] == expected
        assert [content(result) for result in stand.decode_all(requests)] == expected
        assert alone[0].timings.transfer_bytes == stand.exporter.layout.page_bytes
        stand.assert_all_returned()


@pytest.mark.parametrize("page_frames", [1500, 125])
@pytest.mark.parametrize("kv_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_batch_is_projected_into_its_own_pages(
    device: str, kv_dtype: str, page_frames: int
) -> None:
    """As an encoder would have written them; on a GPU within 1e-3 of the CPU's, or a rounding."""
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    layout = kv_layout(checkpoint, page_frames, kv_dtype)
    n = layout.pages_per_window
    cross = PagePool(layout, 3 * n, device)
    cross.tensor.fill_(-7.0)
    landing_pool = PagePool(states_layout(checkpoint), 4, device)
    states = torch.randn(3, 1500, 32, generator=torch.Generator().manual_seed(5))
    landing_pool.tensor[1:] = states.to(device)
    order = torch.randperm(3 * n, generator=torch.Generator().manual_seed(6)).tolist()
    lengths = (1500, 320, 1500)  # the second one's context was trimmed
    of_short = layout.pages_for(lengths[1])
    pages = [tuple(order[:n]), tuple(order[n : n + of_short]), tuple(order[2 * n :])]
    sequences: Any = [
        SimpleNamespace(
            landing_pages=(page,),
            cross_pages=own,
            n_positions=length,
        )
        for page, own, length in zip((3, 1, 2), pages, lengths, strict=True)
    ]
    landing = StatesProjection(checkpoint, landing_pool, cross)
    for projected in landing.project(sequences):
        projected.wait()
    assert landing.n_projected == 3
    expected = torch.full((3 * n, *layout.page_shape), -7.0).to(cross.tensor.dtype)
    with torch.inference_mode():
        scales = kv_scales(checkpoint, cross.tensor.dtype)
        projection = CrossKVProjection(checkpoint, scales=scales)
        as_there = partial(is_packed, cross.tensor)  # a GPU packs no window
        with patch.object(cross_kv, "is_packed", lambda _, frames: as_there(frames)):
            for row, own, length in zip((2, 0, 1), pages, lengths, strict=True):
                projection.write(states[row : row + 1, :length], expected, [own])
    gap = (cross.tensor.cpu().float() - expected.float()).abs()
    share = 0.0 if device == "cpu" else 1e-3 if kv_dtype == "float32" else 2**-3
    largest = (gap - share * expected.float().abs()).max().item()
    assert largest <= (0.0 if device == "cpu" else 1e-3), f"beyond the tolerance by {largest}"


def test_an_attempt_after_the_first_projects_nothing_again(stand: Stand) -> None:
    gates = QualityGates(avg_logprob=0.0, no_speech_prob=None)
    assert stand.decode(temperatures=(0.0, 0.4, 0.8), gates=gates).tokens
    assert stand.engine.stats().fallbacks == 2
    assert projection_of(stand).n_projected == 1


def test_admission_takes_both_kinds_of_pages_or_none() -> None:
    options = {"landing_windows": 1, "fetch_timeout_s": 60.0}
    with make_stand(cached_checkpoint(), reads_states=True, **options) as stand:
        stand.exporter.freeze()
        futures = [stand.engine.submit(stand.request(seed)) for seed in range(3)]
        wait_until(lambda: stand.engine.stats().loading == 1, "not loading")
        stats = stand.engine.stats()
        assert (stats.waiting, stats.pages_free) == (2, stats.pages_total - 1)
        stand.exporter.thaw()
        for future in futures:
            assert future.result(ANSWER_S).tokens
        stand.assert_all_returned()


def test_windows_in_flight_have_states_in_turn_however_few_pages_there_are() -> None:
    options = {"landing_windows": 1, "kv_windows": 1, "max_batch": 2}
    with make_stand(cached_checkpoint(), reads_states=True, **options) as stand:
        assert len(stand.decode_all([{"seed": seed} for seed in range(8)])) == 8
        stand.assert_all_returned()


def test_a_projection_that_raises_costs_only_the_culprit(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stand.decode_all([{"seed": 0}, {"seed": 1}])
    landing = projection_of(stand)
    project = landing.project

    def poisoned(sequences: Any) -> Any:
        if any(sequence.request.window == 6 for sequence in sequences):
            raise RuntimeError("poison")
        return project(sequences)

    monkeypatch.setattr(landing, "project", poisoned)
    bad = stand.engine.submit(stand.request(6))
    good = stand.decode_all([{"seed": 0}, {"seed": 1}])
    with pytest.raises(SequenceFailedError, match="poison"):
        bad.result(ANSWER_S)
    for result, alone in zip(good, expected, strict=True):
        assert_same(result, alone)


class Slow:
    """A projection that the device is done with when the test says so."""

    def __init__(self, landing: StatesProjection, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched = threading.Event()
        self._done = threading.Event()
        self._project = landing.project
        monkeypatch.setattr(landing, "project", self._launch)

    def _launch(self, sequences: Any) -> Any:
        self.launched.set()
        projected = self._project(sequences)
        for one in projected:
            one.is_done = self._done.is_set  # type: ignore[method-assign]
            one.wait = lambda: self._done.wait(ANSWER_S)  # type: ignore[assignment,method-assign]
        return projected

    def end(self) -> None:
        self._done.set()


def test_nobody_waits_for_a_projection(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stand.decode()
    running = stand.engine.submit(stand.request(1, max_new_tokens=200))
    wait_until(lambda: stand.engine.stats().running == 1, "not running")
    slow = Slow(projection_of(stand), monkeypatch)
    landed = stand.engine.submit(stand.request())
    assert slow.launched.wait(ANSWER_S)
    assert running.result(ANSWER_S).tokens
    assert not landed.done()
    assert stand.importer.pool.n_used == 1
    slow.end()
    assert_same(landed.result(ANSWER_S), expected)


def test_pages_are_held_until_a_projection_that_nobody_wants_has_ended(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(projection_of(stand), monkeypatch)
    future = stand.engine.submit(stand.request())
    assert slow.launched.wait(ANSWER_S)
    assert future.cancel()
    slow.end()

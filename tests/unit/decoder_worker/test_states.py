"""Encoder states that land give what their KV gives, and every page of both pools comes back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.common.errors import (
    LayoutMismatchError,
    SequenceFailedError,
)
from cluster.common.kv.connect import kv_layout, states_layout
from cluster.common.kv.cross_kv import CrossKVProjection
from cluster.common.kv.pool import PagePool
from cluster.common.messages import DecodeRequest, DecodeResult
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.kv_scales import kv_scales
from decoder_worker.states import StatesProjection
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import (
    ANSWER_S,
    Stand,
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


class LandingStand:
    """A decoder to which encoder states come, or the KV that is made of them."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.engine = stand.engine
        self.states = stand.exporter
        self.landing = stand.importer.pool
        self.cross = stand.engine._pool
        scales = kv_scales(stand.checkpoint, self.cross.tensor.dtype)
        self._projection = CrossKVProjection(stand.checkpoint, scales=scales)

    def request(self, seed: int, **changes: Any) -> DecodeRequest:
        """Window `seed` in the payload that the decoder reads; the same KV either way."""
        options = REQUESTS[seed % len(REQUESTS)]
        states = random_states(self.stand.checkpoint, seed)
        reads_states = self.states.layout.payload == "encoder_states"
        if not reads_states:
            with torch.inference_mode():
                states = self._projection.project(states[None])[0]
        handle = self.stand.publish(seed, states)
        return self.stand.request(seed, handle=handle, **{**options, **changes})

    @property
    def projection(self) -> StatesProjection:
        found = self.engine._loop._landing._projection
        assert found is not None
        return found

    def decode(self, *requests: DecodeRequest) -> list[DecodeResult]:
        futures = [self.engine.submit(request) for request in requests]
        return [future.result(ANSWER_S) for future in futures]

    def assert_all_returned(self) -> None:
        self.stand.assert_all_returned()


@contextmanager
def make_landing(*, reads_states: bool = True, **options: Any) -> Iterator[LandingStand]:
    """As `make_stand`."""
    with make_stand(cached_checkpoint(), reads_states=reads_states, **options) as stand:
        yield LandingStand(stand)


def content(result: DecodeResult) -> tuple[Any, ...]:
    return (result.tokens, result.language, result.alignment)


@pytest.mark.parametrize(
    "options",
    [{}, {"page_frames": 100, "page_tokens": 16}, {"kv_dtype": "float8_e4m3fn", "page_frames": 50}],
)
def test_states_give_what_their_kv_gives(options: dict[str, Any]) -> None:
    """Alone, and in one batch."""
    seeds = range(len(REQUESTS))
    with make_landing(reads_states=False, **options) as of_kv:
        expected = [of_kv.decode(of_kv.request(seed))[0] for seed in seeds]
    with make_landing(**options) as made:
        alone = [made.decode(made.request(seed))[0] for seed in seeds]
        together = made.decode(*(made.request(seed) for seed in seeds))
        assert [content(r) for r in alone] == [content(r) for r in expected]
        assert [content(r) for r in together] == [content(r) for r in expected]
        bytes_moved = alone[0].timings.transfer_bytes
        assert bytes_moved == made.states.layout.page_bytes
        made.assert_all_returned()


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
        for row, own, length in zip((2, 0, 1), pages, lengths, strict=True):
            projection.write(states[row : row + 1, :length], expected, [own])
    gap = (cross.tensor.cpu().float() - expected.float()).abs()
    share = 0.0 if device == "cpu" else 1e-3 if kv_dtype == "float32" else 2**-3
    largest = (gap - share * expected.float().abs()).max().item()
    assert largest <= (0.0 if device == "cpu" else 1e-3), f"beyond the tolerance by {largest}"


@pytest.mark.parametrize("reads_states", [True, False])
def test_the_other_payload_is_refused(reads_states: bool) -> None:
    """Both roles have one setting; what comes of another one is told, and harms nobody."""
    with (
        make_landing(reads_states=reads_states) as made,
        make_landing(reads_states=not reads_states) as other,
    ):
        (expected,) = made.decode(made.request(0))
        foreign = other.request(1)
        with pytest.raises(LayoutMismatchError, match="different models or settings"):
            made.decode(foreign)
        assert other.states.revoke(foreign.handle.lease)
        (found,) = made.decode(made.request(0))
        assert content(found) == content(expected)
        made.assert_all_returned()


def test_an_attempt_after_the_first_projects_nothing_again() -> None:
    """Fallback decodes from KV that is there: the landing page is long gone."""
    with make_landing() as made:
        tried = made.request(0, temperatures=(0.0, 0.4, 0.8))
        gates = replace(tried.options.gates, avg_logprob=0.0, no_speech_prob=None)
        (result,) = made.decode(replace(tried, options=replace(tried.options, gates=gates)))
        assert made.engine.stats().fallbacks == 2
        assert made.projection.n_projected == 1
        assert result.tokens
        made.assert_all_returned()


def test_admission_takes_both_kinds_of_pages_or_none() -> None:
    with make_landing(landing_windows=1, fetch_timeout_s=60.0) as made:
        made.states.freeze()
        futures = [made.engine.submit(made.request(seed)) for seed in range(3)]
        wait_until(lambda: made.engine.stats().loading == 1, "not loading")
        stats = made.engine.stats()
        assert (stats.waiting, stats.pages_free) == (2, stats.pages_total - 1)
        made.states.thaw()
        for future in futures:
            assert future.result(ANSWER_S).tokens
        made.assert_all_returned()


def test_windows_in_flight_have_states_in_turn_however_few_pages_there_are() -> None:
    with make_landing(landing_windows=1, kv_windows=1, max_batch=2) as made:
        assert len(made.decode(*(made.request(seed) for seed in range(8)))) == 8
        made.assert_all_returned()


def test_a_projection_that_raises_costs_only_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_landing() as made:
        expected = made.decode(made.request(0), made.request(1))
        landing = made.projection
        project = landing.project

        def poisoned(sequences: Any) -> Any:
            if any(sequence.request.window == 6 for sequence in sequences):
                raise RuntimeError("poison")
            return project(sequences)

        monkeypatch.setattr(landing, "project", poisoned)
        bad = made.engine.submit(made.request(6))
        good = made.decode(made.request(0), made.request(1))
        with pytest.raises(SequenceFailedError, match="poison"):
            bad.result(ANSWER_S)
        assert [content(result) for result in good] == [content(result) for result in expected]
        made.assert_all_returned()


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


def test_nobody_waits_for_a_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run go on, and the sequence begins once its KV is there."""
    with make_landing(max_batch=2, kv_windows=2) as made:
        (expected,) = made.decode(made.request(0))
        running = made.engine.submit(made.request(1, max_new_tokens=200))
        wait_until(lambda: made.engine.stats().running == 1, "not running")
        slow = Slow(made.projection, monkeypatch)
        landed = made.engine.submit(made.request(0))
        assert slow.launched.wait(ANSWER_S)
        assert running.result(ANSWER_S).tokens
        assert not landed.done()
        landing = made.landing
        assert landing.n_used == 1
        slow.end()
        assert content(landed.result(ANSWER_S)) == content(expected)
        made.assert_all_returned()


def test_pages_are_held_until_a_projection_that_nobody_wants_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_landing() as made:
        slow = Slow(made.projection, monkeypatch)
        future = made.engine.submit(made.request(0))
        assert slow.launched.wait(ANSWER_S)
        assert future.cancel()
        slow.end()
        made.assert_all_returned()
        landing = made.landing
        assert landing.n_used == 0

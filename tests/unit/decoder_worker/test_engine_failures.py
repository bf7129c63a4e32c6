"""Whatever ends a sequence, in whatever state: its pages, slot and lease come back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

import decoder_worker.engine
from cluster.common.errors import (
    DeadlineExceededError,
    HandleRefusedError,
    PeerLostError,
    SequenceFailedError,
    StaleGenerationError,
    TransferTimeoutError,
    WorkerDiedError,
    WorkerDrainingError,
)
from cluster.common.messages import DecodeResult
from decoder_worker.scheduling.sequence import SequenceState
from decoder_worker.states import Projected
from tests.support.checkpoints import cached_checkpoint
from tests.support.workers.decoder_engines import ANSWER_S, Stand, make_stand, wait_until

STATES = (SequenceState.WAITING, SequenceState.LOADING, SequenceState.RUNNING)
MODES: dict[str, dict[str, Any]] = {
    "kv": {},
    "states": {"reads_states": True},
    "a step ahead": {"ahead": 1, "bucketed": True},
}


class Gate:
    """Holds the engine in a decode step until opened; a step ahead, while two are in flight."""

    def __init__(self, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        runner, is_ahead = stand.engine._loop._runner, stand.engine._loop._launches._depth > 0
        name = "collect" if is_ahead else "decode"
        run = getattr(runner, name)

        def held(argument: Any) -> Any:
            if not is_ahead or any(s.n_in_flight == 2 for s in argument.sequences):
                self.entered.set()
                assert self._open.wait(ANSWER_S)
            return run(argument)

        monkeypatch.setattr(runner, name, held)

    def open(self) -> None:
        self._open.set()


def make(mode: str) -> AbstractContextManager[Stand]:
    """Room for one window only, so that a second one waits."""
    options = {"kv_windows": 1, "landing_windows": 1, "fetch_timeout_s": 60.0, **MODES[mode]}
    return make_stand(cached_checkpoint(), **options)


@pytest.fixture(params=MODES)
def stand(request: pytest.FixtureRequest) -> Iterator[Stand]:
    with make(request.param) as made:
        yield made
        made.exporter.thaw()
        made.assert_all_returned()
        assert made.engine.healthy() is None


def bring_to(
    state: SequenceState, stand: Stand, gate: Gate, **options: Any
) -> Future[DecodeResult]:
    """Submit a sequence and see it reach `state`, where it stays."""
    engine = stand.engine
    if state is SequenceState.RUNNING:
        future = engine.submit(stand.request(0, **options))
        assert gate.entered.wait(ANSWER_S)
        return future
    stand.exporter.freeze()
    first = engine.submit(stand.request(0, **options))
    wait_until(lambda: engine.stats().loading == 1, "not loading")
    if state is SequenceState.LOADING:
        return first
    second = engine.submit(stand.request(1, **options))
    wait_until(lambda: engine._loop.scheduler.n_waiting == 1, "not waiting")
    return second


@pytest.mark.parametrize("state", STATES)
def test_cancel(state: SequenceState, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(stand, monkeypatch)
    future = bring_to(state, stand, gate)
    assert future.cancel()
    if state is SequenceState.LOADING:
        # The READ may still write: nothing is free before it ended.
        wait_until(lambda: stand.engine.stats().cancelled == 1, "not cancelled")
        assert stand.importer.pool.n_free == 0
        stand.exporter.thaw()
    gate.open()
    stand.exporter.thaw()
    after = stand.engine.submit(stand.request(2))
    assert after.result(ANSWER_S).tokens
    assert stand.engine.stats().cancelled == 1


@pytest.mark.parametrize("state", STATES)
def test_deadline(state: SequenceState, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(stand, monkeypatch)
    remaining_s = 0.3
    future = bring_to(state, stand, gate, remaining_s=remaining_s)
    if state is SequenceState.RUNNING:
        threading.Timer(2 * remaining_s, gate.open).start()
    with pytest.raises(DeadlineExceededError, match=state.value):
        future.result(ANSWER_S)
    if state is not SequenceState.RUNNING:
        assert stand.importer.pool.n_free == 0  # of the first sequence, whose READ is in flight


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state", STATES)
def test_close(state: SequenceState, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make(mode) as stand:
        gate = Gate(stand, monkeypatch)
        future = bring_to(state, stand, gate)
        closing = threading.Thread(target=stand.engine.close)
        closing.start()
        gate.open()
        with pytest.raises(WorkerDrainingError):
            future.result(ANSWER_S)
        stand.exporter.thaw()
        closing.join(ANSWER_S)
        assert not closing.is_alive()
        stand.assert_all_returned()


def test_a_dead_peer_fails_its_sequences_only(stand: Stand) -> None:
    stand.exporter.freeze()
    request = stand.request(0)
    future = stand.engine.submit(request)
    wait_until(lambda: stand.engine.stats().loading == 1, "not loading")
    stand.exporter.kill()
    with pytest.raises(PeerLostError):
        future.result(ANSWER_S)
    wait_until(lambda: stand.importer.pool.n_free == 1, "pages are held")
    assert stand.engine.healthy() is None
    stand.exporter.revoke(request.handle.lease)  # the dead hear no release


def test_kv_that_was_reused_is_never_decoded(stand: Stand) -> None:
    request = stand.request(0)
    assert stand.exporter.revoke(request.handle.lease)
    pages = stand.exporter.reserve(1, ANSWER_S)
    assert pages is not None
    with pytest.raises(StaleGenerationError):
        stand.engine.submit(request).result(ANSWER_S)
    stand.exporter.abandon(pages)


def test_a_forged_handle_is_refused_by_its_future(stand: Stand) -> None:
    request = stand.request(0)
    forged = replace(request, handle=replace(request.handle, frames=7))
    with pytest.raises(HandleRefusedError):
        stand.engine.submit(forged).result(ANSWER_S)
    stand.exporter.revoke(request.handle.lease)


@pytest.mark.parametrize("reads_states", [False, True])
def test_pages_of_a_late_read_stay_in_quarantine_until_it_ends(reads_states: bool) -> None:
    options: dict[str, Any] = {"kv_windows": 8, "landing_windows": 8, "fetch_timeout_s": 0.2}
    with make_stand(cached_checkpoint(), reads_states=reads_states, **options) as stand:
        stand.exporter.freeze()
        future = stand.engine.submit(stand.request(0))
        with pytest.raises(TransferTimeoutError):
            future.result(ANSWER_S)
        assert stand.engine.stats().pages_quarantined == 1
        assert stand.engine.stats().pages_free == (8 if reads_states else 7)
        stand.engine.check_integrity()
        stand.exporter.thaw()
        wait_until(lambda: stand.importer.pool.n_free == 8, "still in quarantine")
        stand.assert_all_returned()


def test_an_importer_that_raises_fails_the_sequence_as_our_own_error(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("broken")

    with monkeypatch.context() as patch:
        patch.setattr(stand.importer, "fetch", broken)
        with pytest.raises(SequenceFailedError, match="broken"):
            stand.engine.submit(stand.request(0)).result(ANSWER_S)


def test_a_hung_step_is_unhealthy(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(stand, monkeypatch)
    future = bring_to(SequenceState.RUNNING, stand, gate)
    assert stand.engine.healthy() is None
    with monkeypatch.context() as patch:
        patch.setattr(decoder_worker.engine, "STUCK_S", 0.05)
        wait_until(lambda: stand.engine.healthy() is not None, "healthy though hung")
    gate.open()
    assert future.result(ANSWER_S).tokens


@pytest.mark.parametrize("thread", ["decoder-engine", "decoder-hurry"])
def test_an_error_outside_of_any_sequence_answers_all_and_is_reported(
    thread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_stand(cached_checkpoint()) as stand:
        gate = Gate(stand, monkeypatch)
        future = bring_to(SequenceState.RUNNING, stand, gate)
        hurries = thread == "decoder-hurry"
        monkeypatch.setattr(stand.engine._loop, "is_hurried", lambda: hurries)
        admit = stand.engine._loop.scheduler.admit

        def broken() -> Any:
            if threading.current_thread().name != thread:
                return admit()
            raise RuntimeError("no order")

        monkeypatch.setattr(stand.engine._loop.scheduler, "admit", broken)
        gate.open()
        with pytest.raises(WorkerDiedError, match="no order"):
            future.result(ANSWER_S)
        wait_until(lambda: "no order" in str(stand.engine.healthy()), "healthy though failed")
        request = stand.request(1)
        with pytest.raises(WorkerDrainingError):
            stand.engine.submit(request)
        stand.exporter.revoke(request.handle.lease)
        stand.assert_all_returned()


def test_a_beam_that_cannot_be_moved_ends_its_own_sequence_alone(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room for a copy")

    expected = stand.decode(1)
    monkeypatch.setattr(stand.engine._loop._runner, "copy_kv", broken)
    beams, other = (
        stand.engine.submit(stand.request(seed, beam_size=size)) for seed, size in ((0, 2), (1, 1))
    )
    with pytest.raises(SequenceFailedError, match="no room for a copy"):
        beams.result(ANSWER_S)
    assert other.result(ANSWER_S).tokens == expected.tokens
    assert stand.engine.healthy() is None


# A lost device is told by everything that waited for it, and all sequences are answered still.


def lose_device(*args: Any) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@contextmanager
def between_turns(stand: Stand) -> Iterator[None]:
    """While open, the engine waits for what is asked of it next."""
    may_go_on = threading.Event()

    def hold() -> None:
        assert may_go_on.wait(ANSWER_S)

    stand.engine._post(hold)
    yield
    may_go_on.set()


def test_a_device_that_is_told_lost_more_than_once() -> None:
    with make_stand(cached_checkpoint()) as stand:
        with between_turns(stand):
            future = stand.engine.submit(stand.request(0))
            for _ in range(3):
                stand.engine._post(lose_device)
        with pytest.raises(WorkerDiedError, match="illegal memory access"):
            future.result(ANSWER_S)
        stand.assert_all_returned()


def test_a_device_that_is_lost_with_projections_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Projected, "is_done", lambda _: False)
    monkeypatch.setattr(Projected, "wait", lose_device)
    with make_stand(cached_checkpoint(), reads_states=True) as stand:
        with between_turns(stand):
            futures = [stand.engine.submit(stand.request(seed)) for seed in range(2)]
        for future in futures:
            with pytest.raises(WorkerDiedError, match="illegal memory access"):
                future.result(ANSWER_S)
        stand.assert_all_returned()

"""Launching a step before the last one's results were read changes no result, and leaks nothing.

The checkpoint's end of text is eight times as likely, so that texts end where the host does not
foresee it, and a row runs once more for nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.common.errors import DeadlineExceededError, SequenceFailedError, WorkerDrainingError
from cluster.common.messages import DecodeResult, QualityGates, SampledToken
from tests.support.checkpoints import make_checkpoint
from tests.support.workers.decoder_engines import ANSWER_S, Stand, make_stand, wait_until

LADDER = (0.0, 0.4, 0.8)
NEVER_GOOD = QualityGates(avg_logprob=0.0)

REQUESTS: tuple[dict[str, Any], ...] = (
    *({"seed": seed, "max_new_tokens": 40, "timestamps": seed % 2 == 1} for seed in range(8)),
    {"seed": 8, "temperatures": (0.9,), "max_new_tokens": 30},
    {"seed": 1, "temperatures": LADDER, "gates": NEVER_GOOD, "max_new_tokens": 30},
    {"seed": 5, "temperatures": LADDER, "gates": NEVER_GOOD, "words": True},
    {"seed": 3, "beam_size": 3, "max_new_tokens": 20},
    {"seed": 0, "temperatures": (0.0, 0.7), "best_of": 3, "gates": NEVER_GOOD},
    {"seed": 7, "language": None, "prompt_tokens": tuple(range(50)), "max_new_tokens": None},
    {"seed": 4, "max_new_tokens": 1},
    {"seed": 6, "language": None, "detect_only": True},
    {"seed": 2, "words": True, "max_new_tokens": 20},
)
MODES: dict[str, dict[str, Any]] = {
    "ahead": {"steps_ahead": 1},
    "bucketed": {"steps_ahead": 0, "bucketed": True},
    "both": {"steps_ahead": 1, "bucketed": True},
    "both, small pages": {
        "steps_ahead": 1,
        "bucketed": True,
        "page_tokens": 16,
        "page_frames": 100,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("ending"))
    tensors = load_file(path / "model.safetensors")
    eot = json.loads((path / "config.json").read_text())["eos_token_id"]
    tensors["model.decoder.embed_tokens.weight"][eot] *= 8
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[DecodeResult]:
    """Each of REQUESTS alone, every step collected at once."""
    with make_stand(folder, max_batch=8) as stand:
        return [decode(stand, **options) for options in REQUESTS]


@pytest.fixture
def stand(folder: Path) -> Iterator[Stand]:
    with make_stand(folder, steps_ahead=1, bucketed=True) as made:
        yield made
        made.assert_all_returned()


def decode(stand: Stand, **options: Any) -> DecodeResult:
    return stand.engine.submit(stand.request(**options)).result(ANSWER_S)


def assert_same(result: DecodeResult, alone: DecodeResult, what: Any) -> None:
    for field in ("tokens", "language", "finish_reason", "attempt"):
        assert getattr(result, field) == getattr(alone, field), (what, field)
    assert result.token_logprobs == pytest.approx(alone.token_logprobs, abs=1e-4), what
    assert result.avg_logprob == pytest.approx(alone.avg_logprob, abs=1e-4), what
    assert (result.alignment is None) == (alone.alignment is None), what
    if result.alignment and alone.alignment:
        assert result.alignment.tokens == alone.alignment.tokens, what
        assert result.alignment.times_s == pytest.approx(alone.alignment.times_s, abs=0.021), what


@pytest.mark.parametrize("mode", MODES)
def test_results_are_those_of_single_sequences_collected_at_once(
    mode: str, folder: Path, expected: list[DecodeResult]
) -> None:
    """All kinds at once, three rounds of them, so that slots and pages are used again."""
    with make_stand(folder, max_batch=7, **MODES[mode]) as stand:
        for _ in range(3):
            futures = [stand.engine.submit(stand.request(**options)) for options in REQUESTS]
            for options, future, alone in zip(REQUESTS, futures, expected, strict=True):
                assert_same(future.result(ANSWER_S), alone, options)
        stand.assert_all_returned()


def test_the_row_that_runs_for_nothing_is_dropped(stand: Stand) -> None:
    """One step more than the text needs, and no trace of it in what the caller gets."""
    told: list[SampledToken] = []
    options = {"seed": 1, "max_new_tokens": 40, "timestamps": True}
    result = stand.engine.submit(stand.request(**options), told.append).result(ANSWER_S)
    assert result.finish_reason == "stop"
    assert tuple(each.token for each in told) == result.tokens
    assert result.timings.steps == len(result.tokens)  # the last gave the end of text
    stand.assert_all_returned()
    assert stand.engine.stats().steps == len(result.tokens) + 1


def test_a_length_limit_is_foreseen(stand: Stand) -> None:
    result = decode(stand, seed=2, max_new_tokens=40)
    assert result.finish_reason == "length"
    stand.assert_all_returned()
    assert stand.engine.stats().steps == 39


class Hold:
    """Holds the collecting of a step while the next one is in flight, and lets one through."""

    def __init__(self, stand: Stand, monkeypatch: pytest.MonkeyPatch, n_tokens: int = 3) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()
        runner = stand.engine._loop._runner
        collect = runner.collect

        def held(launched: Any) -> Any:
            if any(
                s.rows and len(s.rows[0].tokens) >= n_tokens and s.n_in_flight
                for s in launched.sequences
            ):
                self.entered.set()
                assert self._open.wait(ANSWER_S)
            return collect(launched)

        monkeypatch.setattr(runner, "collect", held)

    def open(self) -> None:
        self._open.set()


def in_flight(stand: Stand) -> int:
    return max((s.n_in_flight for s in stand.engine._loop.scheduler.running), default=0)


def watch_releases(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was in flight of each sequence when its pages went back."""
    scheduler = stand.engine._loop.scheduler
    release, seen = scheduler.release, []

    def watched(sequence: Any) -> None:
        seen.append(sequence.n_in_flight)
        release(sequence)

    monkeypatch.setattr(scheduler, "release", watched)
    return seen


@pytest.mark.parametrize("way", ["cancel", "deadline", "close"])
def test_pages_stay_held_while_a_launched_step_may_write_them(
    way: str, stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = watch_releases(stand, monkeypatch)
    hold = Hold(stand, monkeypatch)
    remaining_s = 0.3 if way == "deadline" else ANSWER_S
    future = stand.engine.submit(stand.request(2, max_new_tokens=40, remaining_s=remaining_s))
    assert hold.entered.wait(ANSWER_S)
    assert in_flight(stand) == 2
    if way == "cancel":
        assert future.cancel()
        hold.open()
    elif way == "deadline":
        threading.Timer(2 * remaining_s, hold.open).start()
        with pytest.raises(DeadlineExceededError):
            future.result(ANSWER_S)
    else:
        closing = threading.Thread(target=stand.engine.close)
        closing.start()
        hold.open()
        with pytest.raises(WorkerDrainingError):
            future.result(ANSWER_S)
        closing.join(ANSWER_S)
    stand.assert_all_returned()
    assert seen == [0]


def poisoned(
    run: Callable[[Any], Any], sequences_of: Callable[[Any], Any], n_tokens: int
) -> Callable[[Any], Any]:
    """Raises whenever window 9 takes part, once it has so many tokens."""

    def poisoned_run(argument: Any) -> Any:
        result = run(argument)
        for s in sequences_of(argument):
            if s.request.window == 9 and s.rows and len(s.rows[0].tokens) >= n_tokens:
                raise RuntimeError("poison")
        return result

    return poisoned_run


@pytest.mark.parametrize("method", ["prefill", "decode", "collect"])
@pytest.mark.parametrize("n_tokens", [0, 4])
def test_a_failure_costs_only_the_culprit(
    method: str,
    n_tokens: int,
    stand: Stand,
    expected: list[DecodeResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launching or collecting it, at its prompt and later, a step in flight or not."""
    runner = stand.engine._loop._runner
    seen = watch_releases(stand, monkeypatch)

    def sequences_of(argument: Any) -> Any:
        return argument.sequences if method == "collect" else argument

    run = getattr(runner, method)
    monkeypatch.setattr(runner, method, poisoned(run, sequences_of, n_tokens))
    bad = stand.engine.submit(stand.request(9, max_new_tokens=30))
    good = [stand.engine.submit(stand.request(**options)) for options in REQUESTS[:12]]
    if method == "prefill" and n_tokens:
        assert bad.result(ANSWER_S).tokens  # nothing ever prefills it again
    else:
        with pytest.raises(SequenceFailedError, match="poison"):
            bad.result(ANSWER_S)
    for options, future, alone in zip(REQUESTS, good, expected, strict=False):
        assert_same(future.result(ANSWER_S), alone, options)
    stand.assert_all_returned()
    assert stand.engine.healthy() is None
    assert not any(seen)


def test_cancelled_sequences_leave_the_others_alone(
    stand: Stand, expected: list[DecodeResult]
) -> None:
    """Cancelled at any moment: waiting, just begun, in the middle, in a second attempt."""
    for round_ in range(4):
        leaving = [
            stand.engine.submit(stand.request(seed, max_new_tokens=40, temperatures=LADDER))
            for seed in range(4)
        ]
        good = [stand.engine.submit(stand.request(**options)) for options in REQUESTS[:6]]
        before = stand.engine.stats().steps
        wait_until(
            lambda before=before, n=5 * round_: stand.engine.stats().steps >= before + n,
            "no step was made",
        )
        for future in leaving:
            future.cancel()
        for options, future, alone in zip(REQUESTS, good, expected, strict=False):
            assert_same(future.result(ANSWER_S), alone, options)
    stand.assert_all_returned()


@pytest.mark.parametrize("method", ["decode", "collect", "detect_language"])
def test_a_lost_device_is_no_sequences_fault(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica says that it failed, so that another one takes its windows."""

    def lost(argument: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with make_stand(folder, steps_ahead=1, bucketed=True) as stand:
        monkeypatch.setattr(stand.engine._loop._runner, method, lost)
        future = stand.engine.submit(stand.request(0, language=None))
        with pytest.raises(WorkerDrainingError, match="illegal memory access"):
            future.result(ANSWER_S)
        wait_until(lambda: stand.engine.healthy() is not None, "healthy though its device is lost")
        stand.assert_all_returned()

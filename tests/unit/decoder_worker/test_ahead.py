"""Neither steps ahead nor fixed sizes change a result, leak anything, or make others wait.

The checkpoint's end of text is eight times as likely, so that texts end where the host does not
foresee it, and a row runs once more for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.common.errors import SequenceFailedError, WorkerDiedError
from cluster.common.messages import DecodeResult
from decoder_worker.gpu.graphs import Buckets, bucket_sizes, few_sizes
from tests.support.checkpoints import make_checkpoint
from tests.support.workers.decoder_engines import (
    ANSWER_S,
    REQUESTS,
    Stand,
    assert_same,
    make_stand,
    wait_until,
)

MODES: dict[str, dict[str, Any]] = {
    "together": {},
    "both": {"ahead": 1, "bucketed": True},
    "both, small pages": {"ahead": 1, "bucketed": True, "page_tokens": 16, "page_frames": 100},
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
    with make_stand(folder, max_batch=8) as stand:
        return [stand.decode(**options) for options in REQUESTS]


@pytest.fixture
def stand(folder: Path) -> Iterator[Stand]:
    with make_stand(folder, max_batch=8, ahead=1, bucketed=True) as made:
        yield made
        made.assert_all_returned()


@pytest.mark.parametrize("mode", MODES)
def test_results_are_those_of_single_sequences_collected_at_once(
    mode: str, folder: Path, expected: list[DecodeResult]
) -> None:
    """All kinds at once, twice, so that slots and pages are used again; all fit some bucket."""

    def refused(*args: Any) -> Any:
        raise AssertionError("a forward outside of the buckets")

    with make_stand(folder, max_batch=8, **MODES[mode]) as stand:
        if "bucketed" in MODES[mode]:
            runner = stand.engine._loop._runner
            runner._forward = runner._plan = refused  # type: ignore[method-assign]
        for _ in range(2):
            for options, result, alone in zip(REQUESTS, stand.decode_all(), expected, strict=True):
                assert_same(result, alone, options)
        stand.assert_all_returned()


def test_the_row_that_runs_for_nothing_is_dropped(stand: Stand) -> None:
    result = stand.decode(seed=1, max_new_tokens=40, timestamps=True)
    assert result.finish_reason == "stop"
    assert result.timings.steps == len(result.tokens)  # the last gave the end of text
    stand.assert_all_returned()
    assert stand.engine.stats().steps == len(result.tokens) + 1


def test_a_length_limit_is_foreseen(stand: Stand) -> None:
    result = stand.decode(2, max_new_tokens=40)
    assert result.finish_reason == "length"
    stand.assert_all_returned()
    assert stand.engine.stats().steps == 39


@pytest.mark.parametrize(
    ("method", "n_tokens"),
    [("prefill", 0), ("decode", 0), ("decode", 4), ("collect", 0), ("collect", 4)],
)
def test_a_failure_costs_only_the_culprit(
    method: str,
    n_tokens: int,
    stand: Stand,
    expected: list[DecodeResult],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = stand.engine._loop._runner
    run = getattr(runner, method)

    def poisoned(argument: Any) -> Any:
        """Raises whenever window 9 takes part, once it has so many tokens."""
        result = run(argument)
        for s in argument.sequences if method == "collect" else argument:
            if s.request.window == 9 and s.rows and len(s.rows[0].tokens) >= n_tokens:
                raise RuntimeError("poison")
        return result

    monkeypatch.setattr(runner, method, poisoned)
    bad = stand.engine.submit(stand.request(9, max_new_tokens=30))
    good = [stand.engine.submit(stand.request(**options)) for options in REQUESTS[:12]]
    with pytest.raises(SequenceFailedError, match="poison"):
        bad.result(ANSWER_S)
    for options, future, alone in zip(REQUESTS, good, expected, strict=False):
        assert_same(future.result(ANSWER_S), alone, options)
    stand.assert_all_returned()
    assert stand.engine.healthy() is None


@pytest.mark.parametrize("method", ["decode", "collect", "detect_language"])
def test_a_lost_device_is_no_sequences_fault(
    method: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(argument: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with make_stand(folder, ahead=1, bucketed=True) as stand:
        monkeypatch.setattr(stand.engine._loop._runner, method, lost)
        future = stand.engine.submit(stand.request(0, language=None))
        with pytest.raises(WorkerDiedError, match="illegal memory access"):
            future.result(ANSWER_S)
        wait_until(lambda: stand.engine.healthy() is not None, "healthy though its device is lost")
        stand.assert_all_returned()


# At fixed sizes.


def test_sizes_of_buckets() -> None:
    assert bucket_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]
    assert bucket_sizes(7) == [1, 2, 4, 7]
    assert few_sizes(16, 4) == [1, 4, 16]
    assert few_sizes(12, 4) == [1, 4, 12]
    assert few_sizes(1, 2) == [1]


def test_slots_that_did_not_reach_a_bucket_are_brought_again(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [{"seed": seed, "max_new_tokens": 40} for seed in range(2)]
    expected = [stand.decode(**each) for each in options]
    put, failed = Buckets._put, list[tuple[int, ...]]()

    def without_room(self: Buckets, buffer: torch.Tensor, values: tuple[int, ...]) -> None:
        if not failed and not self.form.n_tokens and len(values) == len(options):
            failed.append(values)
            raise torch.OutOfMemoryError("no room for slots")
        put(self, buffer, values)

    monkeypatch.setattr(Buckets, "_put", without_room)
    for result, alone in zip(stand.decode_all(options), expected, strict=True):
        assert_same(result, alone)
    assert failed

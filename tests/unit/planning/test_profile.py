"""Profiles are read, checked and interpolated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cluster.cli.planning import profile as profile_command
from cluster.common.errors import ConfigurationError, DeadlineExceededError
from cluster.common.messages import WINDOW_SAMPLES, EncodeRequest
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import BUNDLED_MODEL, Settings
from cluster.planning.measure import Bench, measure
from cluster.planning.profile import Point, Surface, load_profile, shipped_profiles

GPUS = ("a100", "a10g", "h100", "l4", "l40s", "t4")
PREDICTED = {f"{model}-{gpu}" for model in ("large-v3", "large-v3-turbo") for gpu in GPUS}


def test_the_shipped_profiles_say_which_of_them_are_predicted() -> None:
    found = {name: load_profile(name) for name in shipped_profiles()}
    assert {name for name, one in found.items() if one.predicted} == PREDICTED
    assert found.keys() - PREDICTED == {"two-cores", "large-v3-h200", "large-v3-turbo-h200"}
    assert all(one.name == name and one.source for name, one in found.items())


def test_a_wrong_name_tells_the_right_ones() -> None:
    with pytest.raises(ConfigurationError, match="two-cores"):
        load_profile("three-cores")


def test_a_file_that_is_no_profile_tells_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text('{"name": "no"}')
    with pytest.raises(ConfigurationError, match=r"no\.json is not a profile: predicted"):
        load_profile(str(tmp_path / "no.json"))


def surface(*points: tuple[int, int, float]) -> Surface:
    names = ("size", "positions", "seconds")
    return Surface([Point(**dict(zip(names, one, strict=True))) for one in points])


def test_seconds_lie_on_the_lines_between_points_and_never_below_the_least() -> None:
    found = surface((1, 300, 0.01), (1, 1500, 0.05), (4, 300, 0.02), (4, 1500, 0.14))
    assert found.at(1, 300) == pytest.approx(0.01)
    assert found.at(2, 1500) == pytest.approx(0.08)
    assert found.at(1, 900) == pytest.approx(0.03)
    assert found.at(8, 1500) == pytest.approx(0.26), "beyond the points the line goes on"
    assert found.at(1, 1) == pytest.approx(0.01)
    assert surface((1, 1500, 0.5)).at(7, 20) == 0.5, "one point is the same everywhere"
    assert surface((1, 1500, 0.5), (1, 1500, 0.9)).at(2, 1500) == 0.9, "of two the last one"


def test_windows_of_a_round_may_take_a_minute_each() -> None:
    def submit(request: EncodeRequest) -> None:
        raise DeadlineExceededError(f"{request.remaining_s}")

    engines: Any = SimpleNamespace(encoder=SimpleNamespace(submit=submit), decoder=None)
    with pytest.raises(DeadlineExceededError) as caught:
        Bench(engines, np.zeros(WINDOW_SAMPLES, np.int16)).run(16, 1500, 1500)
    assert float(caught.value.message) >= 16 * 60.0


def test_what_the_host_does_between_steps_is_a_part_of_them() -> None:
    def done(**result: Any) -> Any:
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(**result))
        return lambda _request: future

    encode = SimpleNamespace(batch_size=1, encode_s=0.1)
    decode = SimpleNamespace(transfer_bytes=10, transfer_s=0.1, decode_s=1.5, steps=20)
    engines: Any = SimpleNamespace(
        encoder=SimpleNamespace(submit=done(handle="of its KV", timings=encode)),
        decoder=SimpleNamespace(
            submit=done(timings=decode),
            stats=lambda: SimpleNamespace(prefill_s=0.0, step_s=0.0, steps=0),
        ),
        importer=SimpleNamespace(accept=lambda _handle: None),
    )
    bench = Bench(engines, np.zeros(WINDOW_SAMPLES, np.int16))
    bench.run(2, 1500, 1500)
    assert bench.fastest["step", 2, 1500] == pytest.approx(0.075)


@pytest.mark.parametrize("output", ["missing/mine.json", "."])
def test_a_file_that_cannot_be_written_is_told_before_the_measurement(
    output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("it takes minutes")

    monkeypatch.setattr("cluster.planning.measure.measure", measured)
    with pytest.raises(ConfigurationError, match="--output"):
        profile_command(tmp_path / output)


def test_of_several_models_none_is_measured_in_the_place_of_all(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("models: {tiny: {model: openai/whisper-tiny}}\n")
    with pytest.raises(ConfigurationError, match="one model is measured at a time"):
        profile_command(tmp_path / "missing" / "mine.json", config_file=file)


async def test_a_measurement_that_is_cancelled_ends_behind_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = []

    @asynccontextmanager
    async def engines(settings: Settings, *_: object) -> AsyncIterator[Any]:
        checkpoint = open_checkpoint(BUNDLED_MODEL, weights=False)
        yield SimpleNamespace(settings=settings, checkpoint=checkpoint)

    def run(bench: Bench, n: int, positions: int, _: int) -> None:
        rounds.append(positions)
        bench.fastest |= {(what, n, positions): 1.0 for what in ("prompts", "step")}
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    monkeypatch.setattr("cluster.planning.measure.local_engines", engines)
    monkeypatch.setattr(Bench, "run", run)
    sizes = {"encoder": {"export_windows": 1}, "decoder": {"max_batch": 1}}
    with pytest.raises(asyncio.CancelledError):
        await measure("own", Settings.model_validate(sizes), 3, lambda _: None)
    assert len(rounds) == 1

"""`splitscribe batch` from its command line to its status, with an engine that needs no cluster."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.archives.outputs import LOCK, SPEED
from cluster.cli.batch import run as batch_run
from cluster.cli.batch.run import joined_application, model_of
from cluster.cli.main import app
from cluster.common.errors import ConfigurationError, SplitscribeError
from cluster.common.settings_sources import load_settings
from tests.support.archives import FakeEngine


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    there = load_settings(None, {}, environ={}), "this build"
    monkeypatch.setattr(batch_run, "joined_application", lambda *_: nullcontext(there))
    monkeypatch.setattr(batch_run, "engine_of_application", engine.opened)
    monkeypatch.setattr(batch_run, "cluster_watched", lambda progress: nullcontext())
    return engine


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    folder = tmp_path / "talks"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.mp3").write_text(name)
    return folder


def batch(*args: object, stdin: str = "") -> Any:
    return CliRunner().invoke(app, ["batch", *map(str, args)], input=stdin)


def refused(*args: object) -> str:
    result = batch(*args)
    assert isinstance(result.exception, SplitscribeError), result.output
    return result.exception.message


def test_all_done_is_status_0_and_some_failed_is_3(engine: FakeEngine, talks: Path) -> None:
    output = talks.parent / "texts"
    result = batch(talks, "-o", output, "-f", "json", "-f", "txt")
    assert result.exit_code == 0, result.output
    assert "2 of 2 files have their transcripts" in result.output
    assert (output / "one.txt").read_text() == "one\n"
    (talks / "bad.mp3").write_text("broken")
    result = batch(talks, "-o", output)
    assert result.exit_code == 3
    assert "2 done, 1 to do" in result.output
    assert "1 failed, for the reasons in" in result.output
    assert engine.heard == ["one", "two", "broken"] or engine.heard == ["two", "one", "broken"]
    assert batch(talks, "-o", output).exit_code == 3
    assert len(engine.heard) == 3
    batch(talks, "-o", output, "--retry-failed")
    assert len(engine.heard) == 4


def test_a_list_may_come_from_standard_input(engine: FakeEngine, talks: Path) -> None:
    lines = f'{talks}/one.mp3\n\n{{"path": "{talks}/two.mp3"}}\n'
    result = batch("-", "-o", talks.parent / "texts", "-f", "txt", stdin=lines)
    assert result.exit_code == 0, result.output
    assert sorted(engine.heard) == ["one", "two"]
    assert (talks.parent / "texts/two.txt").read_text() == "two\n"


def test_a_dry_run_tells_and_does_nothing(engine: FakeEngine, talks: Path) -> None:
    output = talks.parent / "texts"
    (talks / "long.wav").write_bytes(bytes(64_000 * 7200))
    result = batch(talks, "-o", output, "--dry-run")
    assert result.exit_code == 0
    assert "3 files, 3 to do, about 2.0 h of audio by their sizes" in result.output
    assert "no run has measured yet" in result.output
    assert engine.heard == []
    (output / SPEED).write_text('{"hours_per_hour": 4.0}')
    result = batch(talks, "-o", output, "--dry-run")
    assert "4.0 hours per hour, about 30.0 min" in result.output
    assert {file.name for file in output.iterdir()} == {LOCK, SPEED}
    batch(talks / "one.mp3", "-o", output)
    kept = {file: file.read_bytes() for file in output.iterdir()}
    result = batch(talks, "-o", output, "--dry-run")
    assert "3 files, 1 done, 2 to do" in result.output
    assert {file: file.read_bytes() for file in output.iterdir()} == kept


def test_fields_of_the_api_are_flags_and_part_of_what_is_done(
    engine: FakeEngine, talks: Path
) -> None:
    output = talks.parent / "texts"
    result = batch(talks, "-o", output, "--language", "en", "--word_timestamps")
    assert result.exit_code == 0, result.exception or result.output
    assert len(engine.heard) == 2
    assert '"words"' in (output / "one.json").read_text()
    batch(talks, "-o", output, "--language", "de")
    assert len(engine.heard) == 4


def test_mistakes_are_told_before_anything_is_started(talks: Path, tmp_path: Path) -> None:
    assert "--output" in refused(talks)
    assert "name files" in refused("-o", tmp_path)
    assert "temperature" in refused(talks, "-o", tmp_path, "--temperature", "7")
    assert "no file or folder" in refused(talks, tmp_path / "nofolder", "-o", tmp_path / "texts")
    assert not (tmp_path / "texts").exists()
    assert batch(talks, "-o", "x", "--files-at-once", "0").exit_code == 2


def test_an_output_that_cannot_be_written_is_told(engine: FakeEngine, talks: Path) -> None:
    (talks.parent / "file").write_text("")
    for place in (talks.parent / "file", "/proc/none"):
        assert "cannot be read or written" in refused(talks, "-o", place)


# ------------------------------------------------------------------- which application


def application_at(address: str | None) -> Any:
    with asyncio.Runner() as runner, joined_application(address, runner, print) as there:
        return there


def test_without_ray_here_the_run_starts_pools_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(batch_run, "ray_addresses_here", set)
    assert application_at(None) is None


def test_of_several_rays_the_user_has_to_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(batch_run, "ray_addresses_here", lambda: {"a:1", "b:2"})
    with pytest.raises(ConfigurationError, match="a:1, b:2"):
        application_at(None)
    assert application_at("none") is None


def test_a_ray_cluster_that_was_named_must_have_an_application(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def has_none() -> Any:
        raise ConfigurationError("the Ray cluster runs no application called 'splitscribe'")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(batch_run, "ray_addresses_here", lambda: {"auto"})
    monkeypatch.setattr(batch_run, "joined_cluster", lambda address: nullcontext())
    monkeypatch.setattr(batch_run, "application_settings", has_none)
    with pytest.raises(ConfigurationError, match=r"Ray at auto: .* `splitscribe deploy`, or"):
        application_at("auto")
    assert application_at(None) is None, "then the run starts pools of its own"


def test_a_served_name_is_known_by_its_checkpoint() -> None:
    several = {
        "large": {"model": "openai/whisper-large-v3", "aliases": ["big"]},
        "tiny": {"model": "openai/whisper-tiny"},
    }
    settings = load_settings(None, {"models": several}, environ={})
    names = ("whisper-1", "large", "big", "tiny", "unknown")
    assert [model_of(settings, name) for name in names] == [
        "openai/whisper-large-v3",
        "openai/whisper-large-v3",
        "openai/whisper-large-v3",
        "openai/whisper-tiny",
        "unknown",
    ]

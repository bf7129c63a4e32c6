"""`splitscribe batch` from its command line to its status, with an engine that needs no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cluster.archives import run as archive_run
from cluster.archives import trial
from cluster.archives.inputs import list_items
from cluster.archives.own_pools import own_settings
from cluster.cli.batch import application
from cluster.cli.batch import run as batch_run
from cluster.cli.batch.application import model_of
from cluster.cli.batch.job import BatchJob
from cluster.cli.main import app
from cluster.errors import ConfigurationError, SplitscribeError
from cluster.settings import Settings
from cluster.settings_sources import load_settings
from tests.support.archives import FakeEngine, LocalRun


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """An application is found whose engine is this one."""
    engine = FakeEngine()

    @contextmanager
    def found(job: BatchJob, say: Any) -> Iterator[Settings]:
        yield load_settings(None, {}, environ={})

    monkeypatch.setattr(batch_run, "found_application", found)
    monkeypatch.setattr(
        archive_run, "ray_data", lambda archive, heard: LocalRun(engine, fields=archive.fields)
    )
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
    assert "2 are done, 1 to do" in result.output
    assert "1 failed, for the reasons in" in result.output
    assert engine.heard == ["one", "two", "broken"] or engine.heard == ["two", "one", "broken"]
    assert batch(talks, "-o", output).exit_code == 3
    assert len(engine.heard) == 3
    batch(talks, "-o", output, "--retry-failed")
    assert len(engine.heard) == 4


def test_a_list_may_come_from_standard_input(engine: FakeEngine, talks: Path) -> None:
    lines = f'{talks}/one.mp3\n{{"path": "{talks}/two.mp3"}}\n'
    result = batch("-", "-o", talks.parent / "texts", "-f", "txt", stdin=lines)
    assert result.exit_code == 0, result.output
    assert sorted(engine.heard) == ["one", "two"]
    assert (talks.parent / "texts/two.txt").read_text() == "two\n"


def test_a_dry_run_tells_and_does_nothing(
    engine: FakeEngine, talks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = talks.parent / "texts"
    (talks / "long.wav").write_bytes(bytes(64_000 * 7200))

    def measured(archive: Any, items: Any) -> archive_run.Measured:
        return archive_run.Measured(speed=4.0, audio_s=30.0)

    monkeypatch.setattr(batch_run, "measure_speed", measured)
    result = batch(talks, "-o", output, "--dry-run")
    assert result.exit_code == 0
    assert "3 files, about 2.0 h of audio" in result.output
    assert "4.0 hours per hour, about 30 min" in result.output
    assert engine.heard == []
    assert not list(output.glob("*.json"))


@pytest.mark.parametrize("kind", ["list", "held"])
def test_a_trial_transcribes_some_and_tells_why_it_could_not(
    talks: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Files, and audio within a Parquet file."""
    (talks / "bad.mp3").write_text("broken")
    names = [talks / "one.mp3", talks / "two.mp3", talks / "bad.mp3", talks / "gone.mp3"]
    if kind == "held":
        contents = [file.read_bytes() if file.exists() else b"broken" for file in names]
        pq.write_table(pa.table({"bytes": contents}), talks / "held.parquet")
        names = [talks / "held.parquet"]
    items = list_items([str(name) for name in names])
    sources = [(item.path, item.row, item.column) for item in items]
    monkeypatch.setattr(trial, "unlimited_engine", engine.opened)
    fields = {"model": "whisper-1"}
    _, audio_s, why = trial._trial(fields, "transcribe", sources, 20.0)
    assert audio_s == 5.0
    assert why.startswith("2 of 4 files failed, as with: ")
    speed, audio_s, why = trial._trial(fields, "transcribe", sources[2:3], 20.0)
    assert (speed, audio_s, why) == (0, 0, "1 of 1 files failed, as with: this is no audio")


def test_fields_of_the_api_are_flags_and_part_of_what_is_done(
    engine: FakeEngine, talks: Path
) -> None:
    output = talks.parent / "texts"
    result = batch(talks, "-o", output, "--language", "en", "--word_timestamps", "-f", "none")
    assert result.exit_code == 0, result.exception or result.output
    assert len(engine.heard) == 2
    assert {file.suffix for file in output.rglob("*") if file.is_file()} >= {".parquet", ".csv"}
    batch(talks, "-o", output, "--language", "en", "--word-timestamps", "-f", "json")
    assert len(engine.heard) == 2
    assert '"words"' in (output / "one.json").read_text()
    batch(talks, "-o", output, "--language", "de")
    assert len(engine.heard) == 4


def test_mistakes_are_told_before_anything_is_started(talks: Path, tmp_path: Path) -> None:
    assert "--output" in refused(talks)
    assert "name files" in refused("-o", tmp_path)
    assert "temperature" in refused(talks, "-o", tmp_path, "--temperature", "7")
    assert "no other format" in refused(talks, "-o", tmp_path, "-f", "none", "-f", "srt")


def test_an_output_that_cannot_be_written_is_told(engine: FakeEngine, talks: Path) -> None:
    (talks.parent / "file").write_text("")
    assert "cannot write to" in refused(talks, "-o", talks.parent / "file")


# ------------------------------------------------------------------- which application


def make_job(**changes: Any) -> BatchJob:
    from cluster.archives.archive import Archive
    from cluster.archives.places import Place

    fields = {"model": "demo", "address": None, "config": None, "dry_run": False} | changes
    return BatchJob(("x",), Archive(Place.of("/tmp")), **fields)


def test_without_ray_here_the_run_starts_pools_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(application, "ray_addresses_here", set)
    with application.found_application(make_job(), print) as found:
        assert found is None
    settings = own_settings("openai/whisper-tiny", None)
    assert (settings.model, settings.router.port) == ("openai/whisper-tiny", 0)


def test_a_settings_file_says_which_model_unless_a_flag_does(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("model: openai/whisper-small\n")
    assert own_settings("demo", file).model == "openai/whisper-small"
    assert own_settings("openai/whisper-tiny", file).model == "openai/whisper-tiny"


def test_of_several_rays_the_user_has_to_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(application, "ray_addresses_here", lambda: {"a:1", "b:2"})
    with (
        pytest.raises(ConfigurationError, match="a:1, b:2"),
        application.found_application(make_job(), print),
    ):
        pass
    with application.found_application(make_job(address="none"), print) as found:
        assert found is None


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


def test_a_bound_of_nothing_is_refused_by_the_parser(talks: Path) -> None:
    assert batch(talks, "-o", "x", "--files-at-once", "0").exit_code == 2

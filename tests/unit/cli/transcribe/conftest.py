"""Command lines without a process of their own, and jobs without a command line."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli.main import app
from cluster.cli.transcribe import live, run
from cluster.cli.transcribe.job import Job, Target
from router.api.params import TranscriptionParams
from router.api.subtitles import PLAIN

CommandLine = Callable[..., Result]
MakeJob = Callable[..., Job]
ParseJob = Callable[..., Any]


@pytest.fixture
def command_line() -> CommandLine:
    """Runs `splitscribe transcribe ARGS`; what it raised is in the result's `exception`."""

    def invoke(*args: str | Path) -> Result:
        return CliRunner().invoke(app, ["transcribe", *map(str, args)])

    return invoke


@pytest.fixture
def job_of(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> ParseJob:
    """Parse a command line into its `Job` or `LiveJob`, which is not run."""

    def parse(*args: str) -> Any:
        jobs: list[Any] = []
        monkeypatch.setattr(run, "transcribe_files", lambda job, *_: jobs.append(job))
        monkeypatch.setattr(live, "transcribe_live", lambda job, *_: jobs.append(job))
        result = command_line(*args)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == 0, result.output
        return jobs[0]

    return parse


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    def make(*files: Path, **changes: Any) -> Job:
        fields: dict[str, Any] = {
            "form": {},
            "params": TranscriptionParams("demo", response_format="verbose_json"),
            "cues": PLAIN,
            "output_dir": tmp_path / "out",
            "formats": ("txt",),
            "verbose": False,
            "jobs": 4,
            "target": Target(),
        }
        return Job(tuple(map(str, files)), **{**fields, **changes})

    return make


@pytest.fixture
def paper() -> Console:
    """A console to read from: `paper.file.getvalue()`."""
    return Console(file=io.StringIO(), soft_wrap=True, highlight=False)

"""What a server prints on stderr: quiet on a terminal, and JSON where log lines are JSON."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import patch

import pytest
from rich.console import Console

from cluster.cli.foreground import serve_foreground
from cluster.cli.stderr_lines import JsonLines, WorkerLines
from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.serve.start.readiness import StopRequest

OURS = "2026-01-31 12:00:00.123 {} encoder/encoder-a-1 - encoder_worker.engine: ready"
SERVES = "{} 2026-01-31 12:00:00,123 serve 7 -- Throughput optimized"
NATIVE = "[2026-01-31 12:00:00,123 {} 7 7] core_worker.cc:2465: has constructor arguments"


def shown(capsys: pytest.CaptureFixture[str], *lines: str, **how: bool) -> list[str]:
    WorkerLines(**({"is_quiet": False, "all_of_serve": False} | how)).take("one", [*lines])
    return capsys.readouterr().err.splitlines()


def test_workers_lines_come_as_they_were_printed_but_for_what_serve_tells_of_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hidden = [SERVES.format("INFO"), "  - gRPC communication enabled", "", NATIVE.format("I")]
    lines = [OURS.format("INFO"), SERVES.format("WARNING"), NATIVE.format("E")]
    assert shown(capsys, *hidden, *lines) == lines
    assert shown(capsys, *hidden, *lines, all_of_serve=True) == [*hidden, *lines]


def test_a_quiet_start_shows_errors_with_all_their_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: broken"]
    errors = [OURS.format("ERROR"), *trace, NATIVE.format("C")]
    quiet = [OURS.format("WARNING"), "  of two lines", SERVES.format("INFO")]
    assert shown(capsys, *quiet, *errors, OURS.format("INFO"), is_quiet=True) == errors


def test_own_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(file=JsonLines(), force_terminal=False, soft_wrap=True)
    console.print(f"splitscribe: {'x' * 200}\n  try  curl", style="bold")
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [one["message"] for one in told] == ["x" * 200, "try  curl"]
    assert all((one["level"], one["role"]) == ("INFO", "serve") for one in told)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigurationError("no such folder"), {"message": "no such folder"}),
        (ValueError("broken"), {"message": "the server has ended with an error"}),
    ],
)
def test_an_error_is_a_line_of_json_and_status_1(
    error: Exception, told: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        patch("cluster.cli.foreground.open_checkpoint", side_effect=error),
        pytest.raises(SystemExit) as ended,
    ):
        serve_foreground(Settings(log_format="json"), Console(), StopRequest())
    assert ended.value.code == 1
    line = json.loads(capsys.readouterr().err)
    assert line.items() >= (told | {"level": "ERROR", "role": "serve"}).items()
    assert ("ValueError: broken" in line.get("exception", "")) == isinstance(error, ValueError)

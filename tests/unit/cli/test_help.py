"""The help of every command on a terminal of 80 columns: names are whole, brackets are text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from cluster.cli.main import COMMANDS, app
from cluster.cli.plain_help import summary_of


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        yield (name,), command
        for inner, own in getattr(command, "commands", {}).items():
            yield (name, inner), own


EVERY = dict(commands())


def help_of(*words: str) -> str:
    return CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "80"}).output


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_no_name_is_cut_and_no_bracket_is_taken_for_markup(words: tuple[str, ...]) -> None:
    shown = help_of(*words)
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for param in EVERY[words].params:
        for name in (one for one in param.opts if one.startswith("-")):
            assert re.search(rf"(?m)(^|[ ,]){re.escape(name)}([ ,]|$)", shown), name
        assert " ".join((param.help or "").split()) in " ".join(shown.split()), param.name


@pytest.mark.parametrize("name", COMMANDS)
def test_a_summary_in_the_list_begins_the_commands_own_help(name: str) -> None:
    """The list is shown without importing the commands."""
    assert COMMANDS[name].summary == summary_of(EVERY[name,])
    assert name in help_of()


def test_the_version_is_told() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"splitscribe {version('splitscribe')}\n")


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("serve --prot 3", "--port"),
        ("transcribe a.wav --langage de", "--language"),
        ("batch a.wav --outptu b", "--output"),
        ("trancribe a.wav", "transcribe"),
    ],
)
def test_a_wrong_name_gets_the_nearest(line: str, near: str) -> None:
    refused = CliRunner().invoke(app, line.split())
    assert refused.exit_code == 2
    assert near in refused.output


def test_print_config_shows_what_came_of_all_sources(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("router:\n  port: 1\n  host: from-file\n")
    flags = ["--config", str(tmp_path / "s.yaml"), "--port", "3", "--api-key", "k3y-0f-1"]
    variable = {"SPLITSCRIBE_ENCODER__MAX_BATCH": "5"}
    shown = CliRunner().invoke(app, ["serve", *flags, "--print-config"], env=variable)
    assert shown.exit_code == 0
    settings = yaml.safe_load(shown.output)
    assert settings["encoder"]["max_batch"] == 5
    assert (settings["router"]["port"], settings["router"]["host"]) == (3, "from-file")
    assert "k3y-0f-1" not in shown.output

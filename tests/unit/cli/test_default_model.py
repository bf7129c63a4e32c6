"""A person's own files: openai/whisper's default model, never the bundled one unasked."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console

from cluster.cli import default_model as own
from cluster.cli.default_model import (
    ask_before_download,
    default_model,
    say_if_toy,
    with_default_model,
)
from cluster.common.errors import ConfigurationError
from cluster.common.settings_sources import load_settings


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a Hub that answers, and nobody at a terminal."""
    monkeypatch.delenv("SPLITSCRIBE_MODEL", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(own, "_answers", lambda url: True)
    return tmp_path


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_it_is_whispers_unless_the_settings_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_model() == "turbo"
    monkeypatch.setenv("SPLITSCRIBE_MODEL", "demo")
    assert default_model() == "demo"
    several: dict[str, Any] = {"models": {"a": {"model": "openai/whisper-tiny"}}}
    settings = load_settings(None, several, environ={})
    assert with_default_model(settings) is settings


def test_what_is_in_the_cache_is_taken_without_a_word(hub: Path) -> None:
    folder = hub / "models--openai--whisper-large-v3-turbo"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError):  # a router's copy has no weights
        ask_before_download("turbo", yes=False)
    (snapshot / "model.safetensors").write_text("")
    ask_before_download("turbo", yes=False)


def test_without_a_terminal_the_answer_comes_at_once_with_what_to_do() -> None:
    with pytest.raises(ConfigurationError, match=r"1\.6 GB from http.*--yes.*--model demo"):
        ask_before_download("turbo", yes=False)
    ask_before_download("turbo", yes=True)
    ask_before_download("demo", yes=False)


@pytest.mark.parametrize("yes", [False, True])
def test_offline_too(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    monkeypatch.setattr(own, "_answers", lambda url: False)
    with pytest.raises(ConfigurationError, match=r"cannot be reached.*network.*--model demo"):
        ask_before_download("turbo", yes=yes)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="HF_HUB_OFFLINE is set"):
        ask_before_download("turbo", yes=yes)


@pytest.mark.parametrize("agrees", [True, False])
def test_at_a_terminal_its_size_is_said_and_asked_for(
    monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    asked: list[str] = []

    def confirm(text: str, **_: Any) -> bool:
        asked.append(text)
        return agrees

    for stream in ("sys.stdin", "sys.stderr"):
        monkeypatch.setattr(stream, Terminal())
    monkeypatch.setattr("typer.confirm", confirm)
    if agrees:
        ask_before_download("turbo", yes=False)
    else:
        with pytest.raises(ConfigurationError, match=r"was not downloaded.*--model demo"):
            ask_before_download("turbo", yes=False)
    assert "1.6 GB from https://huggingface.co" in asked[0]


def test_the_bundled_model_is_called_a_toy_and_no_other_is() -> None:
    paper = Console(file=io.StringIO(), soft_wrap=True)
    say_if_toy({"openai/whisper-tiny", "/models/demo"}, paper)
    assert paper.file.getvalue() == ""  # type: ignore[attr-defined]
    say_if_toy({"openai/whisper-tiny", "demo"}, paper)
    assert "a toy that knows 553 English words" in paper.file.getvalue()  # type: ignore[attr-defined]

"""A person's own files: openai/whisper's default model, never the bundled one unasked."""

from __future__ import annotations

import io
import signal
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from rich.console import Console

from cluster.cli.default_model import default_model, download, say_if_toy, with_default_model
from cluster.common.errors import CheckpointError
from cluster.common.settings_sources import load_settings

OPEN = "cluster.common.model.checkpoint.open_checkpoint"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SPLITSCRIBE_MODEL", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def said_of(model: str) -> str:
    paper = io.StringIO()
    download(model, Console(file=paper, soft_wrap=True))
    return paper.getvalue()


def test_it_is_whispers_unless_the_settings_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_model() == "turbo"
    monkeypatch.setenv("SPLITSCRIBE_MODEL", "demo")
    assert default_model() == "demo"
    several: dict[str, Any] = {"models": {"a": {"model": "openai/whisper-tiny"}}}
    settings = load_settings(None, several, environ={})
    assert with_default_model(settings) is settings


def test_what_is_in_the_cache_is_taken_without_a_word(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads: list[str] = []
    monkeypatch.setattr(OPEN, downloads.append)
    folder = hub / "models--openai--whisper-large-v3-turbo"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert "turbo" in said_of("turbo"), "a router's copy has no weights"
    (snapshot / "model.safetensors").write_text("")
    assert said_of("turbo") == said_of("demo") == ""
    assert downloads == ["turbo", "turbo", "demo"]


def test_its_size_is_said_before_its_download_which_ctrl_c_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paper = Console(file=io.StringIO(), soft_wrap=True)
    before = signal.getsignal(signal.SIGINT)

    def fail(model: str) -> None:
        assert "-turbo (1.6 GB); Ctrl-C stops it" in paper.file.getvalue()  # type: ignore[attr-defined]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        raise CheckpointError("the Hub is unreachable")

    monkeypatch.setattr(OPEN, fail)
    with pytest.raises(CheckpointError, match="unreachable"):
        download("turbo", paper)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_bundled_model_is_called_a_toy_and_no_other_is() -> None:
    paper = Console(file=io.StringIO(), soft_wrap=True)
    say_if_toy({"openai/whisper-tiny", "/models/demo"}, paper)
    assert paper.file.getvalue() == ""  # type: ignore[attr-defined]
    say_if_toy({"openai/whisper-tiny", "demo"}, paper)
    assert "a toy that knows 553 English words" in paper.file.getvalue()  # type: ignore[attr-defined]

"""How many positions a window gets: by its own length alone, and as its checkpoint declares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.common.errors import CheckpointError
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.encoder_context import (
    FILE,
    FULL,
    LENGTHS,
    EncoderContext,
    chosen_context,
    positions_of,
    read_context,
    unused_settings,
)
from cluster.common.settings import EncoderSettings
from tests.support.checkpoints import cached_checkpoint


@pytest.mark.parametrize(
    ("content_frames", "slack", "expected"),
    [(500, 64, 320), (500, 128, 384), (1, 0, 128), (257, 0, 192), (800, 128, 640), (3001, 0, FULL)],
)
def test_the_length_is_the_content_and_the_slack_rounded_up(
    content_frames: int, slack: int, expected: int
) -> None:
    assert EncoderContext(slack, 30.0).positions_for(content_frames, 1500) == expected


def test_every_window_has_its_slack_or_all_positions() -> None:
    rule, last = EncoderContext(64, 30.0), 0
    for content_frames in range(1, 3001):
        n = rule.positions_for(content_frames, 1500)
        assert n == FULL or (n in LENGTHS and n >= positions_of(content_frames) + 64)
        assert (n or 1500) >= last, "a longer window got fewer positions"
        last = n or 1500


def test_a_checkpoint_with_fewer_positions_gets_them_all_in_time() -> None:
    assert EncoderContext(0, 30.0).positions_for(500, 256) == FULL


def write(folder: Path, content: Any) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / FILE).write_text(text)
    return folder


def test_a_declaration_is_read(tmp_path: Path) -> None:
    assert read_context(tmp_path) is None
    assert read_context(write(tmp_path, {"slack": 64, "max_content_s": 30})) == EncoderContext(
        64, 30.0
    )


@pytest.mark.parametrize(
    "content",
    [
        "no json",
        [64, 30.0],
        {"slack": 64},
        {"slack": 64, "max_content_s": 30.0, "more": 1},
        {"slack": -1, "max_content_s": 30.0},
        {"slack": 6.5, "max_content_s": 30.0},
        {"slack": True, "max_content_s": 30.0},
        {"slack": 64, "max_content_s": 0},
        {"slack": 64, "max_content_s": 31},
        {"slack": 64, "max_content_s": "all"},
        '{"slack": 64, "max_content_s": NaN}',
    ],
)
def test_nonsense_in_a_declaration_is_refused(tmp_path: Path, content: Any) -> None:
    with pytest.raises(CheckpointError, match=FILE):
        read_context(write(tmp_path, content))


@pytest.fixture
def undeclared(tmp_path: Path) -> Checkpoint:
    return replace(open_checkpoint(str(cached_checkpoint())), path=tmp_path)


def test_settings_go_before_the_declaration_and_that_before_the_usual(
    undeclared: Checkpoint,
) -> None:
    def chosen(**settings: Any) -> EncoderContext | None:
        return chosen_context(undeclared, EncoderSettings(**settings))

    assert chosen() is None
    assert chosen(context="trimmed") == EncoderContext(128, 8.0)
    assert chosen(context="trimmed", context_slack=0) == EncoderContext(0, 8.0)
    write(undeclared.path, {"slack": 64, "max_content_s": 30.0})
    assert chosen() == chosen(context="trimmed") == EncoderContext(64, 30.0)
    assert chosen(context_max_s=5.0) == EncoderContext(64, 5.0)
    assert chosen(context="full") is None


def test_settings_without_effect_are_told(undeclared: Checkpoint) -> None:
    def unused(**settings: Any) -> tuple[str, ...]:
        given = EncoderSettings(**settings)
        return unused_settings(given, chosen_context(undeclared, given))

    both = {"context_slack": 0, "context_max_s": 5.0}
    assert unused() == ()
    assert unused(context_slack=0) == ("encoder.context_slack",)
    assert unused(**both) == ("encoder.context_slack", "encoder.context_max_s")
    assert unused(context="trimmed", **both) == unused(context="full", **both) == ()
    write(undeclared.path, {"slack": 64, "max_content_s": 30.0})
    assert unused(**both) == ()


def test_the_lengths_are_those_that_windows_may_have() -> None:
    """A GPU has a graph for each of them, and none for lengths that no window has."""
    assert EncoderContext(64, 5.0).lengths(1500) == (128, 192, 256, 320)
    assert EncoderContext(128, 8.0).lengths(1500) == (128, 192, 256, 320, 384, 448, 512, 640)
    assert EncoderContext(64, 30.0).lengths(300) == (128, 192, 256)

"""Word error rates by encoder context: its lengths, what is kept, and a run on two recordings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.accuracy import context
from benchmark.accuracy.context_cells import (
    FULL_SLACK,
    Cell,
    Kept,
    Key,
    frames_begun,
    positions_for,
)
from benchmark.accuracy.context_report import Row, as_json
from benchmark.shared.clips import manifest_clips
from cluster.demo.samples import sample_path, sample_text


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Two recordings of 5 s, and a table of what is said."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    text = sample_text("short")
    for name in ("one.flac", "two.flac"):
        shutil.copy(sample_path("short"), folder / name)
    (folder / "references.tsv").write_text(f"one.flac\t{text}\ntwo.flac\t{text}\n")
    return folder


def test_positions_of_five_seconds() -> None:
    """250 of content and 64 of slack: the server's next length."""
    assert positions_for(64, 30.0, 500, 1500) == 320
    assert positions_for(64, 4.0, 500, 1500) == 0
    assert positions_for(FULL_SLACK, 30.0, 500, 1500) == 0


def test_rows_have_differences_from_full_and_both_speeds() -> None:
    def make_row(slack: int, first: tuple[str, ...], second: tuple[str, ...]) -> Row:
        cell = Cell(Key("m", "s", 0, slack), first, second, 2, 1, 800, 1.0, 0.5)
        return Row.of([cell], ["red dog", "blue cat"], "en")

    full = make_row(FULL_SLACK, ("red dog", "blue cat"), ("red dog", "blue cat"))
    row = as_json(make_row(64, ("red", "blue cat"), ("red dog", "blue cat")), full)
    assert row["first_look"]["points"][0] == 25.0
    assert row["second_look"]["points"] == [0.0, 0.0, 0.0]
    assert row["encoded_twice"] == 0.5
    assert row["files_per_s"] == [2.0, round(2 / 1.5, 3)]


def test_a_part_that_was_held_up_decides_no_speed() -> None:
    def make_row(slack: int, walls_s: tuple[float, ...]) -> Row:
        cells = [
            Cell(Key("m", "s", part, slack), ("a",), ("a",), 1, 0, 320, wall_s, 0.0)
            for part, wall_s in enumerate(walls_s)
        ]
        return Row.of(cells, ["a"] * len(cells), "en")

    row = as_json(make_row(64, (0.5, 0.25, 0.5)), make_row(FULL_SLACK, (1.0, 1.0, 100.0)))
    assert row["files_per_s"] == [2.0, 2.0]
    assert row["times_full"] == [4.0, 4.0]


def test_a_context_without_slack_holds_the_last_sample() -> None:
    pcm = np.zeros(192 * 320 + 33, np.int16)  # a frame that has begun, and is rounded down
    assert positions_for(0, 30.0, frames_begun(pcm), 1500) == 256


def test_a_recording_without_a_reference_is_named(recordings: Path) -> None:
    (recordings / "references.tsv").unlink()
    with pytest.raises(SystemExit, match=r"2 of 2 recordings have no reference.*one\.flac"):
        context.main(["--folder", str(recordings)])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--slacks", "many"], "not 'many'"),
        (["--sets", "odd"], "short, long, unheard, free"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        context.main([*flags, "--demo", "1"] if "--sets" in flags else flags)


def test_a_manifest_of_any_name_lists_files_beside_it(recordings: Path) -> None:
    lines = [{"audio": "two.flac", "text": "second"}, {"audio": "one.flac", "text": "first"}]
    manifest = recordings / "mine.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    clips = manifest_clips(manifest)
    assert [(clip.name, clip.reference) for clip in clips] == [
        ("two.flac", "second"),
        ("one.flac", "first"),
    ]
    (recordings / "one.flac").unlink()
    with pytest.raises(SystemExit, match=r"not there: one\.flac"):
        manifest_clips(manifest)


def test_kept_cells_are_read_again_and_other_flags_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.jsonl"
    cell = Cell(Key("m", "s", 0, 64), ("a",), ("b",), 1, 1, 320, 0.5, 0.25)
    Kept(file, {"part": 1}).add(cell)
    with file.open("a") as lines:
        lines.write('{"key": {"model"')  # the run was killed while it wrote
    assert Kept(file, {"part": 1}).cells == {cell.key: cell}
    with pytest.raises(SystemExit, match="other flags"):
        Kept(file, {"part": 2})


@pytest.mark.slow  # both engines, and their kernels where nobody compiled them yet
def test_a_small_run_prints_its_table_and_is_not_repeated(
    recordings: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ["--folder", str(recordings), "--slacks", "64", "full", "--dtype", "float32"]
    flags += ["--threads", "1", "--part", "1", "--state", str(tmp_path / "state.jsonl")]
    assert context.main(flags) == 0
    printed = capsys.readouterr().out
    assert "encoded twice" in printed
    made: dict[str, Any] = json.loads(printed.splitlines()[-1])
    trimmed, full = made["models"]["demo"]["recordings"]["rows"]
    assert (trimmed["slack"], full["slack"]) == ("64", "full")
    assert trimmed["windows"] == full["windows"] == 2
    assert trimmed["positions"] < full["positions"] == 1500
    assert trimmed["second_look"]["wer"] == full["first_look"]["wer"] == 0.0

    monkeypatch.setattr(context, "measure", None)  # everything is there already
    assert context.main(flags) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["models"] == made["models"]

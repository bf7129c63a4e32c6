"""The benchmark of the first text sends every recording in all four ways."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmark.serving.first_text import main
from cluster.demo.samples import sample_path


@pytest.mark.slow
def test_a_long_recording_has_text_sooner_where_contexts_are_trimmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the number of updates and windows: a test asserts no speed."""
    for file in (sample_path("medium"), sample_path("medium").with_suffix(".txt")):
        shutil.copy(file, tmp_path)
    assert main(["--folder", str(tmp_path), "--rounds", "1", "--dtype", "float32"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["ways"]
    print(found)
    whole = ("full, file", "full, stream", "trimmed, file")
    assert [found[way]["windows"] for way in whole] == [1, 1, 1]
    assert found["trimmed, stream"]["windows"] >= found["trimmed, stream"]["updates"] >= 3
    assert all(way["wer"] < 5 for way in found.values())
    assert all(way["encodes"] == way["windows"] for way in found.values())

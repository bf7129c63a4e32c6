"""The pictures in the documentation are drawn from the results that lie beside them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmark.plots.__main__ import BASE, HERE, RESULTS, main, pictures
from benchmark.plots.chart import Chart, Row, bar_chart

SVG = "{http://www.w3.org/2000/svg}"


def texts(content: str) -> list[str]:
    return [element.text or "" for element in ET.fromstring(content).iter(f"{SVG}text")]


def test_the_command_draws_the_pictures_that_are_in_the_repository(tmp_path: Path) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {file.name: file.read_text() for file in HERE.glob("*.svg")}
    assert drawn == kept, "run `python -m benchmark.plots` and commit what it writes"


def test_the_front_page_shows_each_engine_at_its_best() -> None:
    run = json.loads((RESULTS / f"{BASE}.json").read_text())
    shown = texts(pictures()["speed.svg"])
    for library in ("splitscribe int8", "faster-whisper int8", "openai-whisper float32"):
        rows = [row for row in run["rows"] if row["system"].startswith(library)]
        assert any(text.startswith(library) for text in shown)
        for in_flight in ("1", "8"):
            best = max(row["files_per_s"][in_flight] for row in rows)
            assert f"{best:.2f}" in shown


def test_every_set_up_of_a_run_is_in_its_picture() -> None:
    run = json.loads((RESULTS / f"{BASE}.json").read_text())
    shown = texts(pictures()["base.svg"])
    for row in run["rows"]:
        assert f"{row['files_per_s']['8']:.2f}" in shown, row["system"]
    assert "bfloat16: 8.0" in shown, "the ceiling has its name and its value"


def test_bars_are_as_long_as_their_values() -> None:
    rows = [Row("a <b>", [2.0], [[1.0, 2.0, 3.0]]), Row("c", [1.0])]
    drawn = ET.fromstring(bar_chart(Chart("t", "s", ["p"], rows, "u", end=4.0, step=1.0)))
    bars = [one for one in drawn.iter(f"{SVG}rect") if one.get("class") == "theirs"]
    first, second = (float(one.get("width", "0")) for one in bars)
    assert first == pytest.approx(2 * second, abs=0.2)
    assert len([*drawn.iter(f"{SVG}circle")]) == 3, "one for each round"
    assert "a <b>" in [one.text for one in drawn.iter(f"{SVG}text")]

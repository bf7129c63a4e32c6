"""The pictures in the documentation are drawn from the results that lie beside them."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmark.plots.__main__ import BASE, HERE, RESULTS, main

SVG = "{http://www.w3.org/2000/svg}"


def texts(file: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ET.parse(file).iter(f"{SVG}text")]


def test_the_command_draws_the_pictures_that_are_in_the_repository(tmp_path: Path) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    drawn = {file.name: texts(file) for file in tmp_path.iterdir()}
    kept = {file.name: texts(file) for file in HERE.glob("*.svg")}
    assert drawn == kept, "run `python -m benchmark.plots` and commit what it writes"


def test_the_front_page_shows_each_engine_at_its_best() -> None:
    run = json.loads((RESULTS / f"{BASE}.json").read_text())
    shown = texts(HERE / "speed.svg")
    for library in ("splitscribe int8", "faster-whisper int8", "openai-whisper float32"):
        rows = [row for row in run["rows"] if row["system"].startswith(library)]
        assert any(text.startswith(library) for text in shown)
        for in_flight in ("1", "8"):
            assert f"{max(row['files_per_s'][in_flight] for row in rows):.2f}" in shown

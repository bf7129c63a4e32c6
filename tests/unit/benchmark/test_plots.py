"""The pictures in the documentation are drawn from the results that lie beside them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

from benchmark.plots.__main__ import HERE, main

SVG = "{http://www.w3.org/2000/svg}"


def texts(file: Path) -> list[str]:
    return ["".join(element.itertext()) for element in ET.parse(file).iter(f"{SVG}text")]


def test_the_command_draws_the_pictures_that_are_in_the_repository(tmp_path: Path) -> None:
    assert main(["--to", str(tmp_path)]) == 0
    drawn = {file.name: texts(file) for file in tmp_path.iterdir()}
    kept = {file.name: texts(file) for file in HERE.glob("*.svg")}
    assert drawn == kept, "run `python -m benchmark.plots` and commit what it writes"

"""The tables of fields in the documentation are those of the code."""

from __future__ import annotations

from pathlib import Path

from cluster.cli.reference_api import reference_api
from router.api.request_fields import FIELDS

FILE = Path(__file__).parents[3] / "configs" / "API.md"


def test_the_reference_of_fields_is_the_code_s_own() -> None:
    """Rewrite it with `python -m cluster.cli.reference_api > configs/API.md`."""
    assert FILE.read_text() == reference_api()


def test_every_field_has_a_whole_row() -> None:
    rows = [line for line in reference_api().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [field.spelling for field in FIELDS.values()]
    assert {row.replace(r"\|", "").count("|") for row in rows} == {8}

"""The list of a release's parts holds what is installed with it, and nothing of the tests."""

from __future__ import annotations

from importlib.metadata import version

from tests.support.sbom import document


def test_every_part_has_its_version_and_where_it_comes_from() -> None:
    found = document()
    assert found["metadata"]["component"]["purl"].startswith("pkg:pypi/splitscribe@")
    parts = {one["name"]: one for one in found["components"]}
    for name in ("ray", "torch", "pydantic-core", "pyarrow"):
        assert parts[name]["version"] == version(name)
        assert parts[name]["purl"] == f"pkg:pypi/{name}@{version(name)}"
    assert not {"pytest", "mypy", "splitscribe"} & parts.keys()

"""The distribution check: foreign packages and other builds are refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.common.errors import ConfigurationError
from cluster.serve.distribution import build_id, check_distribution, package_root


def test_this_tree_is_one_distribution() -> None:
    assert (package_root() / "router" / "__init__.py").is_file()
    check_distribution(build_id())


def test_another_build_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="same wheel on every node"):
        check_distribution("0.0.0+000000000000")


def test_a_foreign_router_is_named(tmp_path: Path) -> None:
    """A `router.py` that hides ours is found out before anything of it runs as ours."""
    (tmp_path / "router.py").write_text("")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); " + (
        f"sys.path.insert(1, {str(package_root())!r}); "
        "from cluster.serve.distribution import package_root; package_root()"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert "package 'router' comes from" in run.stderr
    assert run.returncode != 0

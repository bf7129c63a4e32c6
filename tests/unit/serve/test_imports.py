"""What processes import, and from where: torch alone is 130 MB and more than a second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.common.errors import ConfigurationError
from cluster.serve.distribution import check_distribution, package_root
from cluster.serve.ray_environment import ENVIRONMENT, joining_environment

HEAVY = ("torch", "numba", "llvmlite", "transformers", "librosa", "onnxruntime")
FINDS = f"print([name for name in {HEAVY!r} if name in sys.modules])"


def printed(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


@pytest.mark.parametrize("command", ["transcribe", "batch"])
def test_help_waits_for_no_library_that_it_does_not_need(command: str) -> None:
    """Both have the flags from the table of the API's fields."""
    code = (
        "import sys; from cluster.cli.main import app\n"
        f"try: app(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "unwanted = ('numpy', 'ray', 'fastapi', 'torch', 'pyarrow', 'httpx', "
        "'cluster.common.settings', 'tokenizers', 'yaml')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    lines = printed(code)
    assert any("--word-timestamps" in line for line in lines)
    assert lines[-1] == "[]"


@pytest.mark.parametrize(
    ("process", "code"),
    [
        (
            "the command, which names the classes of the replicas",
            "import cluster.cli.foreground, cluster.serve.app; "
            "from cluster.serve.placement import joined_machine; joined_machine(0)",
        ),
        ("the router", "import cluster.serve.replicas.router_replica"),
        ("an audio worker", "import router.audio.worker"),
    ],
)
def test_what_does_not_compute_imports_nothing_that_does(process: str, code: str) -> None:
    assert printed(f"import sys; {code}; {FINDS}") == ["[]"], process


# ---- The distribution check: foreign packages and other builds are refused by name.


def test_another_build_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="same wheel on every node"):
        check_distribution("0.0.0+000000000000")


def test_a_foreign_router_is_named(tmp_path: Path) -> None:
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


# ---- What a process sets before it joins a Ray cluster.


@pytest.mark.parametrize("has_token", [True, False])
def test_the_token_is_sent_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_token: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if has_token:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("0123")
    environment = joining_environment()
    assert environment.pop("RAY_AUTH_MODE", None) == ("token" if has_token else None)
    assert environment == ENVIRONMENT

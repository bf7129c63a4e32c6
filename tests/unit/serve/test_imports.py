"""What the processes import that do not compute: torch alone is 130 MB and more than a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "llvmlite", "transformers", "librosa", "onnxruntime")
FINDS = f"print([name for name in {HEAVY!r} if name in sys.modules])"


@pytest.mark.parametrize("command", ["transcribe", "batch"])
def test_help_waits_for_no_library_that_it_does_not_need(command: str) -> None:
    """Both have the flags from the table of the API's fields."""
    code = (
        "import sys; from cluster.cli.main import app\n"
        f"try: app(['{command}', '--help'])\n"
        "except SystemExit: pass\n"
        "unwanted = ('numpy', 'ray', 'fastapi', 'torch', 'pyarrow')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--word-timestamps" in ran.stdout
    assert ran.stdout.splitlines()[-1] == "[]"


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
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; {FINDS}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]", process

"""What the processes import that do not compute: torch alone is 130 MB and more than a second."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "llvmlite", "transformers", "librosa", "onnxruntime")
FINDS = f"print([name for name in {HEAVY!r} if name in sys.modules])"


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

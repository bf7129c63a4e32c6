"""NIXL, once imported, leaves the logging of its process as it was."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("nixl_cu13", reason="NIXL has wheels for Linux only")

CHECK = """
import logging, logging.handlers, sys
from cluster.common.kv.nixl_wire import load_api
to = logging.StreamHandler(sys.stdout)
buffered = logging.handlers.MemoryHandler(capacity=1, target=to)  # as Ray Serve's log file
logging.getLogger("somebody").addHandler(buffered)
load_api()
assert buffered.target is to
logging.getLogger("somebody").warning("still here")
"""


def test_handlers_of_others_stay_open() -> None:
    """In a process of its own: here NIXL may have been imported before."""
    run = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "still here" in run.stdout

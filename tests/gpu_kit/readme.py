"""The page in a kit: what it holds, what the machine must have, and the commands."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.gpu_kit.bare import THERE
from tests.gpu_kit.packages import ROOT

PAGE = """\
# Running splitscribe's GPU tests and benchmark on a machine without a network

Made on {date} from commit {commit}, for Python {python} and GPUs of sm_{arch}. Nothing is compiled
on the machine but splitscribe's own Triton kernels.

The machine must have a driver for CUDA 13 and, in any version that works together:
{there}.
These wheels bring the rest:

{wheels}

NIXL and Ray are not among them: tests that need them are skipped.

1. Copy this folder and a checkout of splitscribe to the machine.
2. In the checkout, with KIT for this folder:

       python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site KIT/*.whl
       export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1

3. Then, in this order. Each takes ten minutes at most and prints its results as they come; the
   benchmark writes them into a file of OUT at once, so that a stop loses nothing:

       timeout 580 python3 -m pytest -m gpu -q -p no:cacheprovider
       python3 -m benchmark.gpu --sections correct,encoder,decoder,overlap --work /tmp/gpu --out OUT
       python3 -m benchmark.gpu --sections e2e,handoff,hf --work /tmp/gpu --out OUT
       python3 -m benchmark.gpu --sections options --minutes 6 --work /tmp/gpu --out OUT
"""


def readme(kit: Path, python: str, arch: str) -> str:
    """Of a kit whose wheels are in `kit`."""
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    wheels = sorted(kit.glob("*.whl"))
    return PAGE.format(
        date=time.strftime("%Y-%m-%d"),
        commit=commit,
        python=python,
        arch=arch.replace(".", ""),
        there=", ".join(THERE),
        wheels="\n".join(
            f"- {file.name} ({file.stat().st_size / 2**20:.1f} MiB)" for file in wheels
        ),
    )

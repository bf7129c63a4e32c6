"""Whether the package and its extras resolve from PyPI alone with the pins of constraints.txt.

    python -m tests.support.resolution

As on a plain x86-64 Linux machine, from metadata alone: no configuration, no local wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ((), ("dev",), ("bulk", "gpu"))
COMMAND = (
    *("uv", "--no-config", "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
    *("--python", sys.executable),  # which builds what must be built; else uv asks each one here
    *("--python-platform", "x86_64-manylinux_2_28", "--constraints", ROOT / "constraints.txt"),
)


def main() -> int:
    """1 where requirements contradict one another, 0 also where PyPI does not answer."""
    sources = ("INDEX", "FIND_LINKS")  # which uv also reads from variables
    environment = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("UV_") and any(part in name for part in sources))
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    contradictions = 0
    for python in PYTHONS:
        for extras in EXTRAS:
            asked = [part for extra in extras for part in ("--extra", extra)]
            done = subprocess.run(
                [*COMMAND, "--python-version", python, *asked, ROOT / "pyproject.toml"],
                env=environment,
                capture_output=True,
                text=True,
            )
            name = f"Python {python}, splitscribe[{','.join(extras)}]"
            if "No solution found" in done.stderr:  # other failures are of the network
                contradictions += 1
                print(f"{name}: DOES NOT RESOLVE\n{done.stderr}", flush=True)
            elif done.returncode:
                print(f"Not checked whether the pins resolve from PyPI: {done.stderr.strip()}")
                return int(contradictions > 0)
            else:
                print(f"{name}: {done.stdout.count('==')} packages", flush=True)
    return int(contradictions > 0)


if __name__ == "__main__":
    sys.exit(main())

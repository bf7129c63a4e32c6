"""Whether the package and its extras resolve from PyPI alone with the pins of constraints.txt.

    python -m tests.support.resolution

As on a plain x86-64 Linux machine, from metadata alone: no configuration, no local wheels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13")
EXTRAS = ((), ("dev",), ("bulk", "gpu"))
PLATFORM = "x86_64-manylinux_2_28"
# uv's own words for "these requirements contradict one another". Other failures are of the network.
NO_SOLUTION = "No solution found"


@dataclass(frozen=True, slots=True)
class Resolution:
    """pins: `name==version` lines, empty where there is none. error: what uv wrote then."""

    pins: tuple[str, ...]
    error: str = ""

    @property
    def contradicts(self) -> bool:
        return NO_SOLUTION in self.error


def resolve(
    project: Path, constraints: Path, python: str, extras: Sequence[str], *uv_args: str
) -> Resolution:
    """uv_args: passed to uv, for tests: another index, no index."""
    command = ["uv", "--no-config", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    # This interpreter builds what must be built. Without it uv asks each one of the machine.
    command += ["--python", sys.executable]
    command += ["--python-version", python, "--python-platform", PLATFORM]
    command += [part for extra in extras for part in ("--extra", extra)]
    command += ["--constraints", str(constraints), *uv_args, str(project)]
    # uv reads indexes and folders of wheels also from variables; pip's it does not read.
    environment = {name: value for name, value in os.environ.items() if not _is_uv_source(name)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return Resolution((), done.stderr or f"uv ended with status {done.returncode}")
    return Resolution(tuple(line for line in done.stdout.splitlines() if "==" in line))


def _is_uv_source(name: str) -> bool:
    return name.startswith("UV_") and any(part in name for part in ("INDEX", "FIND_LINKS"))


def check(project: Path, constraints: Path, *uv_args: str) -> int:
    """The exit status: 1 where requirements contradict one another, but not offline."""
    contradictions = 0
    for python in PYTHONS:
        for extras in EXTRAS:
            name = f"splitscribe[{','.join(extras)}]" if extras else "splitscribe"
            found = resolve(project, constraints, python, extras, *uv_args)
            if found.contradicts:
                contradictions += 1
                print(f"Python {python}, {name}: DOES NOT RESOLVE\n{found.error}", flush=True)
            elif found.error:
                print(f"Not checked whether the pins resolve from PyPI: {found.error.strip()}")
                return int(contradictions > 0)
            else:
                named = [p for p in found.pins if p.startswith(("torch==", "triton==", "ray=="))]
                packages = f"{len(found.pins)} packages"
                print(f"Python {python}, {name}: {packages}, {', '.join(named)}", flush=True)
    return int(contradictions > 0)


if __name__ == "__main__":
    sys.exit(check(ROOT / "pyproject.toml", ROOT / "constraints.txt"))

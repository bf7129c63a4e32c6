"""Packages for checking the GPU's half without a GPU, in a folder of their own.

    python -m tests.gpu_kit.packages gpu-check               # flashinfer, to call its Python
    python -m tests.gpu_kit.packages gpu-check gpu-kernels   # and CUDA's compiler

The names are extras of pyproject.toml, the versions those of constraints.txt. Packages are
installed without their dependencies, of which flashinfer's come to gigabytes, and outside of the
virtual environment, so that no server takes such a flashinfer for a whole one.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu-check"
INSTALLED = "installed.txt"  # in the folder: what was asked for, written when all of it is there


def installed(extra: str, folder: Path = FOLDER) -> bool:
    """Whether all of an extra is there, in the versions that are wanted now."""
    stamp = folder / INSTALLED
    return stamp.exists() and set(requirements([extra])) <= set(stamp.read_text().splitlines())


def requirements(extras: list[str]) -> list[str]:
    """Return the extras' requirements, pinned where constraints.txt has a version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for extra in extras for line in project["optional-dependencies"][extra]]
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [Requirement(line) for line in lines]
    for one in wanted:
        if version := versions.get(canonicalize_name(one.name)):
            one.specifier = SpecifierSet(f"=={version}")
    return [str(one) for one in wanted]


def install(extras: list[str], folder: Path, pip_args: list[str]) -> bool:
    """Install the extras into the folder; return False if they were there already.

    Raises subprocess.CalledProcessError if pip fails, which has said why.
    """
    wanted = requirements(extras)
    stamp = folder / INSTALLED
    there = set(stamp.read_text().splitlines()) if stamp.exists() else set()
    if set(wanted) <= there:
        return False
    missing = [line for line in wanted if line not in there]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
    stamp.unlink(missing_ok=True)
    if not there:
        shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([*command, *pip_args, *missing], check=True)
    stamp.write_text("".join(f"{line}\n" for line in sorted({*there, *wanted})))
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("extras", nargs="+", choices=("gpu-check", "gpu-kernels", "helm-check"))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--pip-args", default="", help="as in `make PIP_ARGS=...`")
    args = parser.parse_args()
    print(f"Installing {', '.join(args.extras)} into {args.folder}", flush=True)
    try:
        is_new = install(args.extras, args.folder, shlex.split(args.pip_args))
    except subprocess.CalledProcessError:
        print(f"{args.folder} is incomplete: pip could not install all of it", file=sys.stderr)
        return 1
    print("Installed." if is_new else "All of it was there already.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

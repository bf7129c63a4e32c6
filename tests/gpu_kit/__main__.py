"""Build the folder with which a GPU machine without a network runs our GPU tests and benchmark.

    make gpu-kit                                            # for this Python and sm_90a
    python -m tests.gpu_kit --python 3.12 --arch 8.9        # for another

It holds wheels: flashinfer with our kernels compiled in it, and what such a machine lacks besides
(`tests.gpu_kit.bare`), in the versions that are installed here. The folder is checked: its size,
its wheels' names and tags, and that it has exactly the kernels that our backend asks for.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from packaging.utils import parse_wheel_filename

from tests.gpu_kit.bare import THERE, brought_along
from tests.gpu_kit.flashinfer_wheel import make_wheel
from tests.gpu_kit.kernels import ask_for_kernels, compile_kernels
from tests.gpu_kit.packages import ROOT, requirements
from tests.support.gpu.flashinfer_on_cpu import flashinfer_on_cpu

MOST_MIB = 45.0
LEAST_BYTES = 100_000  # of a compiled kernel
PLATFORMS = ("manylinux_2_28", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")
HERE = ".".join(platform.python_version_tuple()[:2])

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

3. Then go on with step 3 of benchmark/gpu/README.md. Its commands write their rows into a file of
   OUT as they come.
"""


def build(target: Path, python: str, arch: str) -> None:
    """Fill `target`, which is made anew. Raises subprocess.CalledProcessError if pip has no wheel
    of a package for that Python.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    libraries = compile_kernels(arch)
    make_wheel(libraries, f"sm{arch.replace('.', '')}", target)
    pinned = [f"{name}=={version(name)}" for name in brought_along(python)]
    pinned += [line for line in requirements(["gpu-check"]) if "flashinfer" not in line]
    pinned += [line for line in requirements(["bench"]) if "loadgen" in line]
    _download(pinned, target, python)
    (target / "README.md").write_text(readme(target, python, arch))


def _download(pinned: Sequence[str], target: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for name in PLATFORMS:
        command += ["--platform", f"{name}_{platform.machine()}"]
    subprocess.run([*command, "--dest", str(target), *pinned], check=True)


def readme(kit: Path, python: str, arch: str) -> str:
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


def mebibytes(target: Path) -> float:
    return sum(file.stat().st_size for file in target.iterdir()) / 2**20


def faults(target: Path, python: str, asked: Sequence[str]) -> list[str]:
    """Describe what is wrong with a kit's wheels: names, tags, and what is missing or too much.

    `asked` are the kernels that our backend asks flashinfer for; each must be there, compiled.
    """
    found, names = [], set()
    for file in sorted(target.glob("*.whl")):
        name, _, _, tags = parse_wheel_filename(file.name)
        names.add(name)
        tag = f"cp{python.replace('.', '')}"
        if not any(one.interpreter in ("py3", tag) or one.abi == "abi3" for one in tags):
            found.append(f"{file.name} is not for Python {python}")
        if name == "flashinfer-python":
            with zipfile.ZipFile(file) as wheel:
                sizes = {Path(one.filename).name: one.file_size for one in wheel.infolist()}
            brought = {one.removesuffix(".so") for one in sizes if one.endswith(".so")}
            found += [f"no kernel {kernel}" for kernel in sorted(set(asked) - brought)]
            found += [f"nobody asked for {kernel}" for kernel in sorted(brought - set(asked))]
            found += [
                f"{one} is empty"
                for one, size in sizes.items()
                if one.endswith(".so") and size < LEAST_BYTES
            ]
    missing = {"flashinfer-python", "apache-tvm-ffi", *brought_along(python)} - names
    return [*found, *(f"no wheel of {name}" for name in sorted(missing))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", default="9.0a", help="8.0, 8.9 or 9.0a [9.0a]")
    parser.add_argument("--python", default=HERE, help=f"of the GPU machine [{HERE}]")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist" / "gpu-kit", help="[dist/gpu-kit]"
    )
    args = parser.parse_args()
    build(args.out, args.python, args.arch)
    size = mebibytes(args.out)
    print(f"{args.out}: {len(list(args.out.iterdir()))} files, {size:.1f} MiB")
    if size > MOST_MIB:
        print(f"that is more than {MOST_MIB:.0f} MiB", file=sys.stderr)
        return 1
    with flashinfer_on_cpu() as asked:
        ask_for_kernels(asked)
    wrong = faults(args.out, args.python, sorted(asked.specs))
    print("\n".join(wrong) or f"All that is asked for is there: {len(asked.specs)} kernels.")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

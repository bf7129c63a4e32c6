"""Compile flashinfer's kernels that this project calls, on a machine without a GPU.

    make gpu-kernels                              # for sm_80, sm_89 and sm_90a
    python -m tests.gpu_kit.kernels --arch 9.0a   # for Hopper only, after the above has fetched all

Our backend runs on the CPU over pools of every kind that it serves
(`tests.support.gpu.flashinfer_on_cpu`), and each kernel that it asks flashinfer for is compiled by
CUDA's compiler from PyPI. What is in `.gpu-check/kernels` already is not compiled again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.backends import FLASHINFER_DTYPES
from tests.gpu_kit.packages import FOLDER
from tests.support.gpu.fake_flashinfer import BACKEND
from tests.support.gpu.flashinfer_on_cpu import OnCpu, flashinfer_on_cpu

ARCHITECTURES = ("8.0", "8.9", "9.0a")  # of the A100, of the L4 and L40, of the H100 and H200
HEAD_DIM = 64  # of every published Whisper


def kernels_folder(arch: str, folder: Path = FOLDER) -> Path:
    return folder / "kernels" / f"sm_{arch.replace('.', '')}"


def ask_for_kernels(asked: OnCpu) -> None:
    """Let the backend ask for all that it uses on a GPU, for every pair of dtypes."""
    backend = import_module(BACKEND)
    for dtype in FLASHINFER_DTYPES:
        for kv_dtype in (dtype, torch.float8_e4m3fn):
            own = torch.zeros(4, 1, 2, 16, 1, HEAD_DIM).to(dtype)
            cross = torch.zeros(4, 1, 2, 16, 1, HEAD_DIM).to(kv_dtype)
            made = backend.FlashInfer(own, cross)
            for n_tokens, attention in (
                (2, made.ragged()),
                (1, made.fixed(1, 1)),
                (2, made.fixed(1, 2)),
            ):
                for page in (1, 2):  # the second plan of a step is another call
                    _run_once(attention, n_tokens, page, dtype)


def _run_once(attention: Any, n_tokens: int, page: int, dtype: torch.dtype) -> None:
    self_kv = PagedKV.make([n_tokens], [[page]], [n_tokens], 16)
    attention.plan(AttentionBatch(self_kv, PagedKV.make([n_tokens], [[page]], [9], 16)))
    attention.begin(torch.arange(n_tokens))
    q = torch.ones(n_tokens, 1, HEAD_DIM).to(dtype)
    attention.self_attention(0, q, q, q)
    attention.cross_attention(0, q)


def compile_kernels(arch: str, folder: Path = FOLDER, jobs: int | None = None) -> dict[str, Path]:
    """Compile kernels that are not there yet, and return all libraries by name.

    `arch` is as flashinfer names it, such as "9.0a"; `folder` holds the extras gpu-check and
    gpu-kernels. `jobs` compilers run at once, by default one for each core. Raises RuntimeError if
    a kernel does not compile.
    """
    libraries: dict[str, Path] = {}
    cache = kernels_folder(arch, folder)
    environment = toolchain(folder) | {"MAX_JOBS": str(jobs or os.cpu_count() or 1)}
    with patch.dict(os.environ, environment), flashinfer_on_cpu(folder, cache, arch) as asked:
        ask_for_kernels(asked)
        for i, (name, spec) in enumerate(sorted(asked.specs.items()), 1):
            begun, was_there = time.monotonic(), spec.jit_library_path.exists()
            print(f"sm_{arch} {i}/{len(asked.specs)} {name}", end=": ", flush=True)
            spec.build()  # ninja, which does what has changed
            libraries[name] = spec.jit_library_path
            size = libraries[name].stat().st_size
            took = "there" if was_there else f"{time.monotonic() - begun:.0f} s"
            print(f"{took}, {size / 2**20:.1f} MiB", flush=True)
    return libraries


def toolchain(folder: Path) -> dict[str, str]:
    """Return the environment in which flashinfer finds the compiler of the extra gpu-kernels."""
    home = folder / "nvidia" / "cu13"
    for link, target in (
        (home / "lib64", "lib"),  # as a toolkit that is not from PyPI has them
        (home / "lib" / "libcudart.so", "libcudart.so.13"),
    ):
        if not link.exists():
            link.symlink_to(target)
    # The driver's library is not on PyPI, and the kernels call nothing of it.
    (home / "lib" / "libcuda.a").write_bytes(b"!<arch>\n")
    path = os.pathsep.join((str(folder / "bin"), str(home / "bin"), os.environ["PATH"]))
    return {"CUDA_HOME": str(home), "PATH": path}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arch", nargs="+", default=list(ARCHITECTURES), metavar="9.0a")
    parser.add_argument("--jobs", type=int, help="compilers at once [one for each core]")
    args = parser.parse_args()
    for arch in args.arch:
        libraries = compile_kernels(arch, jobs=args.jobs)
        size = sum(path.stat().st_size for path in libraries.values())
        print(f"sm_{arch}: {len(libraries)} kernels, {size / 2**20:.1f} MiB in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())

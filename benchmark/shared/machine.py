"""What this machine is, and what it can do at most: for the head of a benchmark's report."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import torch

from benchmark.shared.flops import FRAMES
from cluster.common.model.device import usable_cores
from tests.support.checkpoints import ModelShape

SAMPLE_S = 0.2  # between two looks at memory
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni")


def cpu_info() -> dict[str, Any]:
    """Model, cores that this process may use, and the vector extensions that matter."""
    model, flags = platform.processor(), ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
        values = {name.strip(): value.strip() for name, value in fields.items()}
        family = f"family {values.get('cpu family')} model {values.get('model')}"
        model, flags = f"{values.get('model name', model)}, {family}", values.get("flags", "")
    present = set(flags.split())
    return {
        "cpu": model,
        "cores": usable_cores(),
        "flags": [flag for flag in FLAGS if flag in present],
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
    }


def versions(*packages: str) -> dict[str, str]:
    """Installed versions, and the commit where this is a checkout."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    with suppress(OSError, subprocess.CalledProcessError):
        root = Path(__file__).parents[2]
        command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
        found["commit"] = subprocess.check_output(command, text=True, stderr=-3).strip()
    return found


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over rounds of ours divided by theirs, each ratio within one round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def product_flops(dtype: torch.dtype, shape: ModelShape) -> float:
    """FLOP/s that torch reaches in the encoder's widest product, median of 15."""
    left = torch.randn(FRAMES, shape.d_model).to(dtype)
    right = torch.randn(4 * shape.d_model, shape.d_model).to(dtype)
    times = []
    for _ in range(15 + 3):
        began = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - began)
    return 2 * FRAMES * shape.d_model * 4 * shape.d_model / statistics.median(times[3:])


@dataclass(slots=True)
class Memory:
    rss: int = 0
    pss: int = 0


class MemoryWatch:
    """Samples the memory of process trees while it is entered: not for timed runs."""

    def __init__(self, roots: Sequence[psutil.Process]) -> None:
        self.peak = Memory()
        self._roots = roots
        self._stop = Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            rss = pss = 0
            for process in [p for root in self._roots for p in (root, *_children(root))]:
                with suppress(psutil.Error):
                    full = process.memory_full_info()
                    rss += full.rss
                    pss += getattr(full, "pss", full.rss)
            self.peak.rss = max(self.peak.rss, rss)
            self.peak.pss = max(self.peak.pss, pss)
            if self._stop.wait(SAMPLE_S):
                return


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return list(root.children(recursive=True))
    except psutil.Error:
        return []

"""Describe this machine, and measure its ceiling, for a benchmark's report."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmark.shared.flops import FRAMES
from cluster.common.cores import usable_cores
from tests.support.checkpoints import ModelShape

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni")


def cpu_info() -> dict[str, Any]:
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
    """Return installed versions, and the commit of a checkout."""
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
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def product_flops(dtype: torch.dtype, shape: ModelShape) -> float:
    """Return the FLOP/s of the encoder's widest product in torch, the median of 15."""
    left = torch.randn(FRAMES, shape.d_model).to(dtype)
    right = torch.randn(4 * shape.d_model, shape.d_model).to(dtype)
    times = []
    for _ in range(15 + 3):
        began = time.perf_counter()
        torch.nn.functional.linear(left, right)
        times.append(time.perf_counter() - began)
    return 2 * FRAMES * shape.d_model * 4 * shape.d_model / statistics.median(times[3:])

"""What a run of `benchmark.gpu` is kept as: where and when it ran, its rows, a table of them.

A file is rewritten whole whenever a row has come, so that a run that is stopped has kept all rows.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "nixl-cu13")

Rows = dict[str, Any]


def about(device: str) -> dict[str, Any]:
    """Device, versions and commit, without which a result cannot be repeated."""
    import torch

    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
        dirty = bool(subprocess.check_output([*git, "status", "--porcelain", "-uno"]).strip())
    except (OSError, subprocess.CalledProcessError):
        commit, dirty = "unknown", False
    return {
        "device": name,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit + ("-changed" if dirty else ""),
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
    }


def file_of(summary: dict[str, Any], part: Sequence[str], folder: Path) -> Path:
    """`<device>-<date>-<commit>[-sections].json` in the folder; part: none for all sections."""
    device = summary["device"].lower().replace(" ", "-")
    name = "-".join((device, summary["date"], summary["commit"], *(["+".join(part)] * bool(part))))
    return folder / f"{name}.json"


def keep(summary: dict[str, Any], file: Path) -> None:
    """Write the results as they are now, in the place of what was kept before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(summary, indent=1) + "\n")
    unfinished.replace(file)


def shown(value: Any) -> str:
    """A row in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return "; ".join(shown(one) for one in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_table(results: dict[str, Rows]) -> None:
    """The rows that are single figures or requests per second, and what failed."""
    print("\nsection   what                                                          figure")
    for name, rows in results.items():
        for what, value in rows.items():
            if isinstance(value, dict) and "requests_per_s" in value:
                figure = f"{value['requests_per_s']:.2f} req/s"
                if "e2e_p50_ms" in value:
                    figure += f", p50 {value['e2e_p50_ms']:.0f} ms, p99 {value['e2e_p99_ms']:.0f}"
            elif isinstance(value, dict) and "gain" in value:
                figure = f"{value['gain']:.2f} times taking turns"
            elif isinstance(value, float | int | str) and what != "seconds":
                figure = shown(value)
            else:
                continue
            print(f"{name:<9} {what:<61} {figure}")

"""All that a GPU is to show, in one run: correct first, then every row of the table.

    python -m benchmark.gpu                                # 12 minutes on one H200
    python -m benchmark.gpu --sections correct,encoder,decoder,overlap      # the same in two runs
    python -m benchmark.gpu --sections e2e,handoff,hf
    python -m benchmark.gpu --smoke                        # seconds, tiny shapes, a CPU will do

Random weights in the shapes of large-v3 and turbo, lengths forced. Each section is a process of its
own with its own share of the time: one that fails, hangs or loses the device costs its own rows
that were not measured yet, no others. Before the first, checkpoints are written and kernels
compiled, which the first time on a machine takes some minutes more. The last lines are a short
table and one JSON object; a run on a GPU keeps its results in benchmark/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmark.shared.command import make_parser, print_result

ROOT = Path(__file__).resolve().parents[2]
PREPARE_S = 240.0  # most that checkpoints, and compiling kernels for the first time, may take
SHARES = {  # of the run's time; the rest is for starting each one
    "correct": 0.07,
    "encoder": 0.11,
    "decoder": 0.16,
    "overlap": 0.08,
    "e2e": 0.25,
    "handoff": 0.08,
    "hf": 0.18,
}
GRACE_S = 20.0  # beyond its time, until a section is ended from outside
SMOKE_S = 150.0  # for each section of a smoke run
PACKAGES = ("torch", "triton", "flashinfer-python", "transformers", "nixl-cu13")

Rows = dict[str, Any]


def run_section(name: str, args: argparse.Namespace) -> int:
    """In the child: run one section and write its rows as they come."""
    from benchmark.gpu import kernels as gpu_kernels
    from benchmark.gpu import serving as gpu_serving
    from benchmark.gpu.rig import FULL, SMOKE, Clock, OutOfTimeError, Rig

    run: Callable[[Rig, Clock, Callable[[str, Any], None]], None] = {
        "prepare": gpu_kernels.prepare,
        "correct": gpu_kernels.correct,
        "encoder": gpu_kernels.encoder,
        "decoder": gpu_kernels.decoder,
        "overlap": gpu_serving.overlap,
        "e2e": gpu_serving.e2e,
        "handoff": gpu_serving.handoff,
        "hf": gpu_serving.hugging_face,
    }[name]
    rows: Rows = {}
    file = args.work / f"{name}.json"

    def record(what: str, value: Any) -> None:
        rows[what] = round(value, 4) if isinstance(value, float) else value
        file.write_text(json.dumps(rows))
        print(f"{name}: {what}: {shown(rows[what])}", flush=True)

    clock = Clock(args.seconds)
    rig = Rig(SMOKE if args.smoke else FULL, args.device, args.work)
    try:
        if name != "prepare":
            record("ceilings", rig.measure_ceilings())
        run(rig, clock, record)
    except OutOfTimeError as error:
        record("out of time", str(error))
    except Exception as error:
        traceback.print_exc()
        record("failed", f"{type(error).__name__}: {error}"[:500])
        return 1
    return 0


def shown(value: Any) -> str:
    """A row in one line."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return "; ".join(shown(one) for one in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_sections(names: list[str], args: argparse.Namespace, work: Path) -> dict[str, Rows]:
    """Each in a process of its own; what it had measured is kept however it ended."""
    results: dict[str, Rows] = {}
    for name in ("prepare", *names):
        share = PREPARE_S if name == "prepare" else 60 * args.minutes * SHARES[name]
        seconds = SMOKE_S if args.smoke else share
        command = [sys.executable, "-m", "benchmark.gpu", "--child", name, "--work", str(work)]
        command += ["--device", args.device, "--seconds", str(seconds)]
        command += ["--smoke"] if args.smoke else []
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        begun, ended = time.monotonic(), "ended"
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=seconds + GRACE_S).returncode
            ended = "ended" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            ended = "hung, and was ended"
        file = work / f"{name}.json"
        results[name] = json.loads(file.read_text()) if file.exists() else {}
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        if ended != "ended":
            results[name].setdefault("failed", ended)
    return results


def about(device: str) -> dict[str, Any]:
    """Device, versions and commit: what a result is worth nothing without."""
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


def keep(summary: dict[str, Any], sections: list[str], folder: Path) -> Path:
    """Write the results as `<device>-<date>-<commit>[-sections].json`."""
    folder.mkdir(parents=True, exist_ok=True)
    device = summary["device"].lower().replace(" ", "-")
    part = "" if sections == list(SHARES) else "-" + "+".join(sections)
    file = folder / f"{device}-{summary['date']}-{summary['commit']}{part}.json"
    file.write_text(json.dumps(summary, indent=1) + "\n")
    return file


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--sections", default=",".join(SHARES), help="some of the default, a,b,c")
    parser.add_argument("--minutes", type=float, default=11.0, help="for all sections together")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, in seconds")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="where results go [benchmark/results, on a GPU]")
    parser.add_argument("--work", type=Path, help="for checkpoints; kept when given")
    parser.add_argument("--child", choices=("prepare", *SHARES), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := set(args.sections.split(",")) - set(SHARES):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SHARES)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """0 when every section that was asked for came to its end."""
    args = parse(arguments)
    if args.child:
        return run_section(args.child, args)
    if args.device == "auto":
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.smoke:
        print("there is no CUDA device: only --smoke runs on a CPU", file=sys.stderr)
        return 2
    sections = [name for name in SHARES if name in args.sections.split(",")]
    summary: dict[str, Any] = {"benchmark": "gpu", **about(args.device), "smoke": args.smoke}
    print(f"{summary['device']}, commit {summary['commit']}, {summary['versions']}", flush=True)
    work = args.work or Path(tempfile.mkdtemp(prefix="splitscribe-gpu-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        summary["sections"] = run_sections(sections, args, work)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print_table(summary["sections"])
    folder = args.out or (None if args.smoke else ROOT / "benchmark" / "results")
    if folder is not None:
        print(f"\nkept in {keep(summary, sections, folder)}")
    print_result("gpu", summary)
    return int(any("failed" in rows for rows in summary["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())

"""Compare the fast paths of a GPU with plain ones, then measure it. README.md beside this file has
the commands.

    python -m benchmark.gpu --sections correct --work /tmp/gpu
    python -m benchmark.gpu --work /tmp/gpu         # all sections
    python -m benchmark.gpu --smoke                 # tiny shapes, on a CPU too

Weights are random, in the shapes of large-v3 and turbo. Each section is a process of its own, which
is ended after --seconds; its rows stay, and the next section runs. If `correct` fails, no other
section is run. --work keeps the checkpoints for a later command.

Rows are printed and written at once into a file of benchmark/results/ (or of --out). The last line
is one JSON object. The exit status is 0 when every section came to its end, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import versions

ROOT = Path(__file__).resolve().parents[2]

Rows = dict[str, Any]

SECTIONS = ("correct", "decoder", "encoder", "options", "mlperf", "hf", "e2e")  # in this order
LIMIT_S = 600.0  # of a section


def about(device: str) -> dict[str, Any]:
    import torch

    found = versions("torch", "triton", "flashinfer-python", "transformers", "nixl-cu13")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    return {
        "device": name,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": found.pop("commit", "unknown"),
        "versions": found,
        "date": time.strftime("%Y-%m-%d"),
        "cpus": os.cpu_count(),
    }


def file_of(summary: dict[str, Any], folder: Path) -> Path:
    device = summary["device"].lower().replace(" ", "-")
    return folder / f"{device}-{summary['date']}-{summary['commit']}.json"


def keep(summary: Rows, file: Path) -> None:
    """Write the results, and replace the file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(summary, indent=1) + "\n")
    unfinished.replace(file)


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return "; ".join(shown(one) for one in value) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def keep_rows(file: Path, name: str, rows: Rows) -> None:
    summary = json.loads(file.read_text())
    summary["sections"][name] = rows
    keep(summary, file)


def run_section(name: str, args: argparse.Namespace) -> int:
    """Run one section in this process, and write each row at once."""
    from benchmark.gpu import correct, decode, serving
    from benchmark.gpu.rig import FULL, SMOKE, Record, Rig

    run: Callable[[Rig, Record], None] = {
        "correct": correct.correct,
        "encoder": decode.encoder,
        "decoder": decode.decoder,
        "options": serving.options,
        "mlperf": serving.mlperf,
        "hf": serving.hugging_face,
        "e2e": serving.e2e,
    }[name]
    rows: Rows = {}

    def record(what: str, value: Any) -> None:
        rows[what] = round(value, 4) if isinstance(value, float) else value
        keep_rows(args.file, name, rows)
        print(f"{name}: {what}: {shown(rows[what])}", flush=True)

    rig = Rig(SMOKE if args.smoke else FULL, args.device, args.work)
    try:
        if name != "correct":
            record("rates", rig.measure_rates())
        run(rig, record)
    except Exception as error:
        traceback.print_exc()
        record("failed", f"{type(error).__name__}: {error}"[:500])
        return 1
    return 0


def run_sections(
    names: Sequence[str], file: Path, seconds: float, command: Callable[[str], list[str]]
) -> int:
    """Run each section in a process of its own, which is killed after `seconds`.

    After a `correct` that failed, in this run or in an earlier one that wrote `file`, no other
    section is run. Returns the exit status.
    """
    status = 0
    for name in names:
        sections = json.loads(file.read_text())["sections"]
        if name != "correct" and "failed" in sections.get("correct", {}):
            print("correct failed: nothing else is measured", flush=True)
            return 1
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        keep_rows(file, name, {})
        begun = time.monotonic()
        try:
            code = subprocess.run(command(name), cwd=ROOT, timeout=seconds, check=False).returncode
            failed = f"exit status {code}" if code else ""
        except subprocess.TimeoutExpired:
            failed = f"took longer than {seconds:.0f} s"
        rows = json.loads(file.read_text())["sections"][name]
        rows["seconds"] = round(time.monotonic() - begun, 1)
        if failed:
            rows.setdefault("failed", failed)
            status = 1
        keep_rows(file, name, rows)
    return status


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of the default, a,b,c")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT_S, help="limit of each section [%(default)s]"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, in seconds")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="where results go [benchmark/results, on a GPU]")
    parser.add_argument("--work", type=Path, help="for checkpoints; kept when given")
    parser.add_argument("--child", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := set(args.sections.split(",")) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.child:
        return run_section(args.child, args)
    if args.device == "auto":
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.smoke:
        print("there is no CUDA device: only --smoke runs on a CPU", file=sys.stderr)
        return 2
    names = [name for name in SECTIONS if name in args.sections.split(",")]
    summary: dict[str, Any] = {"benchmark": "gpu", **about(args.device), "smoke": args.smoke}
    print(f"{summary['device']}, commit {summary['commit']}, {summary['versions']}", flush=True)
    with tempfile.TemporaryDirectory(prefix="splitscribe-gpu-") as temporary:
        work = (args.work or Path(temporary)).resolve()  # children run in ROOT
        results = work if args.smoke else ROOT / "benchmark" / "results"
        file = file_of(summary, (args.out or results).resolve())
        before = json.loads(file.read_text())["sections"] if file.exists() else {}
        keep({**summary, "sections": before}, file)

        def command(name: str) -> list[str]:
            child = [sys.executable, "-m", "benchmark.gpu", "--child", name, "--file", str(file)]
            child += ["--work", str(work), "--device", args.device]
            return [*child, "--smoke"] if args.smoke else child

        status = run_sections(names, file, args.seconds, command)
        print_result("gpu", json.loads(file.read_text()))
    return status


if __name__ == "__main__":
    sys.exit(main())

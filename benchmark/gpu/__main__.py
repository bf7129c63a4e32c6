"""All that a GPU is to show: correct first and alone, then what is worth most. README.md beside it
has the commands of the first half hour.

    python -m benchmark.gpu --sections correct --minutes 6 --work /tmp/gpu
    python -m benchmark.gpu --work /tmp/gpu         # what is not there yet, in this order
    python -m benchmark.gpu --smoke                 # seconds, tiny shapes, a CPU will do

Random weights in the shapes of large-v3 and turbo, lengths forced. Each section is a process of its
own with its share of the time that is left: one that fails, hangs or loses the device costs its own
rows that were not measured yet, no others. With --work kept, a section that came to its end is not
run again at the same commit; checkpoints are kept there too. Compiling comes first, and counts.

Rows are printed as they come, and written at once into one file of benchmark/results/ for device,
date and commit (--out takes another folder). The last line is one JSON object. Exit status: 0 when
all that was asked for is there, 1 when something is wrong or failed, 3 when nothing is but not all
was compared or measured.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import versions

ROOT = Path(__file__).resolve().parents[2]

Rows = dict[str, Any]

WEIGHTS = {  # of the time, against one another; in order of value
    "correct": 14,
    "decoder": 16,
    "encoder": 11,
    "options": 20,
    "mlperf": 20,
    "hf": 18,
    "e2e": 25,
}
MINUTES = 9.5  # of a whole command, where ten is all that one may take
PREPARE_SHARE = 0.4  # of them at most, for checkpoints and compiling for the first time
GRACE_S = 20.0  # of a section's time: to start, to end what it was about, and to close
SMOKE_S = 170.0  # for each section of a smoke run
TICK_S = 0.5  # between two looks at a section
COMPLETE = "complete"  # the row of a section that came to its end: its commit
UNDONE = ("out of time", "not compared")  # rows of one that did not
WRONG, NOT_ALL = 1, 3


def about(device: str) -> dict[str, Any]:
    """Device, versions and commit, without which a result cannot be repeated."""
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
    """`<device>-<date>-<commit>.json` in the folder."""
    device = summary["device"].lower().replace(" ", "-")
    return folder / f"{device}-{summary['date']}-{summary['commit']}.json"


def status_of(sections: dict[str, Rows], asked: Sequence[str]) -> int:
    """The exit status of a command that was asked for some sections."""
    if any("failed" in rows or rows.get("wrong") for rows in sections.values()):
        return WRONG
    return 0 if all(COMPLETE in sections.get(name, {}) for name in asked) else NOT_ALL


def keep(summary: Rows, file: Path) -> None:
    """Write what there is by now, in the place of what was kept before."""
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


def run_section(name: str, args: argparse.Namespace) -> int:
    """In the child: run one section and write its rows as they come."""
    from benchmark.gpu import correct, decode, serving
    from benchmark.gpu.rig import FULL, SMOKE, Clock, OutOfTimeError, Record, Rig

    run: Callable[[Rig, Clock, Record], None] = {
        "prepare": correct.prepare,
        "correct": correct.correct,
        "encoder": decode.encoder,
        "decoder": decode.decoder,
        "options": serving.options,
        "mlperf": serving.mlperf,
        "hf": serving.hugging_face,
        "e2e": serving.e2e,
    }[name]
    rows: Rows = {}
    file = rows_file(args.work, name)

    def record(what: str, value: Any) -> None:
        rows[what] = round(value, 4) if isinstance(value, float) else value
        keep(rows, file)
        print(f"{name}: {what}: {shown(rows[what])}", flush=True)

    clock = Clock(args.seconds)
    rig = Rig(SMOKE if args.smoke else FULL, args.device, args.work)
    try:
        if name not in ("prepare", "correct"):
            record("rates", rig.measure_rates())
        run(rig, clock, record)
    except OutOfTimeError as error:
        record("out of time", str(error))
    except Exception as error:
        traceback.print_exc()
        record("failed", f"{type(error).__name__}: {error}"[:500])
        return 1
    return 0


def rows_file(work: Path, name: str) -> Path:
    return work / f"{name}.json"


class Sections:
    """Runs sections, each in a process of its own; what one had measured is kept however it ended.

    results: all rows that there are by now, by section. changed: called whenever there are more.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        work: Path,
        changed: Callable[[dict[str, Rows]], None],
        commit: str = "",
    ) -> None:
        """commit: of which a section that came to its end need not be run again; empty: of none."""
        self._args, self._work, self._changed, self._commit = args, work, changed, commit
        self._deadline = time.monotonic() + 60 * args.minutes
        self.results: dict[str, Rows] = {}

    def run(self, names: Sequence[str]) -> None:
        """Prepare, then run these; together they take no longer than they may.

        Nothing is measured of what was found wrong.
        """
        waiting = [name for name in names if not self._is_there(name)]
        if waiting and not self._is_there("prepare"):
            self._run_one("prepare", PREPARE_SHARE * self._left_s())
        for i, name in enumerate(waiting):
            if status_of({"correct": self.results.get("correct", {})}, ()) == WRONG:
                break
            still = sum(WEIGHTS[one] for one in waiting[i:])
            self._run_one(name, self._left_s() * WEIGHTS[name] / still)

    def _is_there(self, name: str) -> bool:
        """Whether a command before this one came to the section's end; then its rows count."""
        file = rows_file(self._work, name)
        rows = json.loads(file.read_text()) if file.exists() else {}
        if not self._commit or rows.get(COMPLETE) != self._commit:
            return False
        print(f"== {name}: kept from before", flush=True)
        self.results[name] = rows
        self._changed(self.results)
        return True

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _run_one(self, name: str, seconds: float) -> None:
        seconds = SMOKE_S if self._args.smoke else seconds
        rows_file(self._work, name).unlink(missing_ok=True)  # a command's before this one
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        self.results[name] = {}
        begun = time.monotonic()
        failed = self._watch(name, begun + seconds, self.command(name, seconds - GRACE_S))
        self.results[name]["seconds"] = round(time.monotonic() - begun, 1)
        rows = self.results[name]
        if failed is not None:
            rows.setdefault("failed", failed)
        elif not any(rows.get(row) for row in UNDONE):
            rows[COMPLETE] = self._commit
            keep(rows, rows_file(self._work, name))
        self._changed(self.results)

    def command(self, name: str, seconds: float) -> list[str]:
        """Of the section's process, which is to measure for so long."""
        args = self._args
        command = [sys.executable, "-m", "benchmark.gpu", "--child", name]
        command += ["--work", str(self._work), "--device", args.device, "--seconds", str(seconds)]
        return [*command, "--smoke"] if args.smoke else command

    def _watch(self, name: str, deadline: float, command: list[str]) -> str | None:
        """Take the section's rows as they come; how it failed, if it did."""
        file, seen = rows_file(self._work, name), 0
        with subprocess.Popen(command, cwd=ROOT) as process:
            try:
                while True:
                    status = process.poll()
                    if file.exists() and (written := file.stat().st_mtime_ns) != seen:
                        seen, self.results[name] = written, json.loads(file.read_text())
                        self._changed(self.results)
                    if status is not None:
                        return None if status == 0 else f"exit status {status}"
                    if time.monotonic() > deadline:
                        return "hung, and was ended"
                    time.sleep(TICK_S)
            finally:
                process.kill()


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--sections", default=",".join(WEIGHTS), help="some of the default, a,b,c")
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="for all of it [%(default)s]"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, in seconds")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--out", type=Path, help="where results go [benchmark/results, on a GPU]")
    parser.add_argument("--work", type=Path, help="for checkpoints; kept when given")
    parser.add_argument("--child", choices=("prepare", *WEIGHTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := set(args.sections.split(",")) - set(WEIGHTS):
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(WEIGHTS)}")
    return args


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    args = parse(arguments)
    if args.child:
        return run_section(args.child, args)
    if args.device == "auto":
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cpu" and not args.smoke:
        print("there is no CUDA device: only --smoke runs on a CPU", file=sys.stderr)
        return 2
    sections = [name for name in WEIGHTS if name in args.sections.split(",")]
    summary: dict[str, Any] = {"benchmark": "gpu", **about(args.device), "smoke": args.smoke}
    print(f"{summary['device']}, commit {summary['commit']}, {summary['versions']}", flush=True)
    folder = args.out or (None if args.smoke else ROOT / "benchmark" / "results")
    file = None if folder is None else file_of(summary, folder)
    before: dict[str, Rows] = {}  # of commands with other sections
    if file is not None and file.exists():
        before = json.loads(file.read_text())["sections"]

    def changed(results: dict[str, Rows]) -> None:
        summary["sections"] = before | results
        if file is not None:
            keep(summary, file)

    work = args.work or Path(tempfile.mkdtemp(prefix="splitscribe-gpu-"))
    work.mkdir(parents=True, exist_ok=True)
    runner = Sections(args, work, changed, summary["commit"])
    try:
        runner.run(sections)
    finally:
        if args.work is None:
            shutil.rmtree(work, ignore_errors=True)
    if file is not None:
        print(f"kept in {file}")
    print_result("gpu", summary)
    return status_of(runner.results, sections)


if __name__ == "__main__":
    sys.exit(main())

"""The simulator beside real servers whose devices wait: are the latencies the same?

    python -m benchmark.serving.simulation [--workers 1 2] [--loads 0.3 0.6 0.9 1.2] [--seconds 60]
        [--kill]

The servers are real (`benchmark.serving.timed_workers`), and so are the requests: each has audio of
its own, at Poisson times. What came when is then played to the simulator as a trace. Devices are so
slow that the cores of this machine have little to do. First of all a light load, with one worker of
each role, gives what a request costs beside its devices; all others are judged by that figure.
With --kill an encoder is killed in the middle of a run of the load 0.6.

Prints goodput, p50 and p95 of both side by side, their ratios, how long the simulator took, and one
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.server import BenchServer, process_kind, serving
from cluster.planning.profile.model import (
    AudioProfile,
    DecoderProfile,
    EncodePoint,
    EncoderProfile,
    LinkProfile,
    Profile,
    RouterProfile,
    Shape,
    StartProfile,
    StepPoint,
)
from cluster.planning.profile.shipped import save_profile
from cluster.planning.report.summary import percentile as nearest
from cluster.planning.scenario.model import make_scenario
from cluster.planning.simulation.run import simulate

ENCODE_S = 0.4  # of a window: one encoder does 2.5 a second
STEP_S, ROW_S = 0.018, 0.0005
ROWS = (1, 16)
SLO_S = 3.0
TOLERANCE = {"goodput": 0.05, "p50": 0.10, "p95": 0.20}
OWN = (sys.executable, "-m", "benchmark.serving.timed_workers")


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest one; 0 of none."""
    return nearest(sorted(values), percent) if values else 0.0


def slow_profile(overhead_s: float) -> Profile:
    """Of the bundled model's shape. overhead_s: what a request takes beside its devices."""
    steps = tuple(StepPoint(rows=n, positions=1500, seconds=STEP_S + ROW_S * n) for n in ROWS)
    return Profile(
        name="slow",
        predicted=True,
        source="made up for benchmark.serving.simulation",
        model="demo",
        shape=Shape(n_audio_state=384, n_text_state=384, n_text_head=6, n_text_layer=4),
        page_frames=1500,
        encoder=EncoderProfile(
            points=(EncodePoint(batch=1, positions=1500, seconds=ENCODE_S),),
            max_batch=1,
            export_windows=16,
            overlaps=True,
        ),
        decoder=DecoderProfile(steps=steps, prefills=steps, max_batch=16, kv_windows=16),
        handoff=LinkProfile(transport="nixl", latency_s=0.002, bytes_per_s=3e9),
        router=RouterProfile(request_s=overhead_s, window_s=0.0, hop_s=0.0),
        audio=AudioProfile(request_s=0.0, audio_second_s=0.0),
        start_s=StartProfile(encoder=8.0, decoder=8.0, router=8.0),
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests of one run: when each was sent, its audio, and what it took; seconds."""

    starts: list[float]
    audio: list[float]
    latencies: list[float]
    n_failed: int

    def figures(self, seconds: float) -> dict[str, float]:
        good = sum(latency <= SLO_S for latency in self.latencies)
        return {
            "goodput": good / seconds,
            "p50": percentile(self.latencies, 50),
            "p95": percentile(self.latencies, 95),
        }

    def worst_after(self, at_s: float) -> float:
        """The longest latency of requests that came within 15 s around a fault."""
        near = [
            latency
            for start, latency in zip(self.starts, self.latencies, strict=True)
            if at_s - 5 <= start <= at_s + 10
        ]
        return max(near, default=0.0)


def real(server: BenchServer, rate: float, seconds: float, seed: int) -> Seen:
    """Send unique clips of some 5 s at Poisson times."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "benchmark.serving.load", "--base-url", server.url),
            *("--request-rate", str(rate), "--num-prompts", str(max(8, round(rate * seconds)))),
            *("--asr-max-audio-len-sec", "10", "--no-stream", "--no-ceiling", "--seed", str(seed)),
            *("--save-result", "--save-detailed", "--result-dir", folder, "--num-warmups", "2"),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        told = json.loads(next(Path(folder).glob("*.json")).read_text())
    first = min(told["start_times"])
    columns = ("start_times", "audio_lens_s", "latencies", "errors")
    rows = list(zip(*(told[name] for name in columns), strict=True))
    good = [(start - first, audio, latency) for start, audio, latency, error in rows if not error]
    starts, audio, latencies = (list(column) for column in zip(*good, strict=True))
    return Seen(starts, audio, latencies, len(rows) - len(good))


def simulated(
    seen: Seen, workers: int, profile: Profile, kill_at_s: float | None = None
) -> tuple[Seen, float]:
    """The same arrivals in the simulator, and how long that took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        pairs = zip(seen.starts, seen.audio, strict=True)
        lines = (json.dumps({"at_s": at_s, "audio_s": audio_s}) for at_s, audio_s in pairs)
        trace.write_text("\n".join(lines))
        fields: dict[str, Any] = {
            "cluster": {"encoders": workers, "decoders": workers},
            "load": {"kind": "trace", "trace": trace, "seconds": max(seen.starts) + 1.0},
            "faults": [] if kill_at_s is None else [{"at_s": kill_at_s, "role": "encoder"}],
        }
        outcome = simulate(make_scenario(fields), profile)
    answers = outcome.records.answers["interactive"]
    told = Seen(
        list(answers.arrived_s),
        list(answers.audio_s),
        list(answers.latency_s),
        sum(answers.failures.values()),
    )
    return told, time.perf_counter() - began


def calibrated(server: BenchServer, seconds: float) -> Profile:
    """The profile with what this machine's router and calls take, from the lightest load."""
    seen = real(server, 0.15 / ENCODE_S, seconds, seed=99)
    bare, _ = simulated(seen, 1, slow_profile(0.0))
    overhead_s = percentile(seen.latencies, 50) - percentile(bare.latencies, 50)
    return slow_profile(max(0.0, overhead_s))


def kill_encoder(server: BenchServer) -> None:
    """End one of the encoders' processes, as by SIGKILL."""
    for child in server.process.children(recursive=True):
        try:
            if process_kind(child, server.process) == "encoder":
                child.kill()
                return
        except psutil.Error:
            continue


def compare(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All runs, each real and simulated."""
    rows: list[dict[str, Any]] = []
    profile: Profile | None = None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "slow.json")
        save_profile(slow_profile(0.0), file)
        for workers in args.workers:
            counts = ("--encoders", str(workers), "--decoders", str(workers))
            with serving("--profile", str(file), *counts, command=OWN) as server:
                if profile is None:
                    profile = calibrated(server, args.seconds)
                    console.print(f"beside its devices: {profile.router.request_s:.4f} s a request")
                for load in args.loads:
                    rows.append(_compare_one(server, workers, load, args.seconds, profile, None))
                    console.print(json.dumps(rows[-1]))
                if args.kill and workers > 1:
                    at_s = args.seconds / 2
                    rows.append(_compare_one(server, workers, 0.6, args.seconds, profile, at_s))
                    console.print(json.dumps(rows[-1]))
    return rows


def _compare_one(
    server: BenchServer,
    workers: int,
    load: float,
    seconds: float,
    profile: Profile,
    kill_at_s: float | None,
) -> dict[str, Any]:
    rate = load * workers / ENCODE_S
    timer = None
    if kill_at_s is not None:
        timer = threading.Timer(kill_at_s, kill_encoder, (server,))
        timer.start()
    seen = real(server, rate, seconds, seed=round(100 * load))
    told, took_s = simulated(seen, workers, profile, kill_at_s)
    span_s = max(seen.starts) + 1.0
    ours, theirs = told.figures(span_s), seen.figures(span_s)
    row: dict[str, Any] = {
        "workers": workers,
        "load": load,
        "killed": kill_at_s is not None,
        "requests": len(seen.starts),
        "failed": [seen.n_failed, told.n_failed],
        "simulator_s": round(took_s, 2),
    }
    for name in TOLERANCE:
        row[name] = [round(theirs[name], 3), round(ours[name], 3)]
        row[f"{name}_ratio"] = round(ours[name] / theirs[name], 3) if theirs[name] else None
    if kill_at_s is not None:
        row["worst_near_kill"] = [round(one.worst_after(kill_at_s), 2) for one in (seen, told)]
    return row


def print_table(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="real / simulated; seconds, requests per second within 3 s")
    for column in ("workers", "load", "requests", *TOLERANCE, "within tolerance"):
        table.add_column(column)
    for row in rows:
        well = [
            name
            for name, limit in TOLERANCE.items()
            if row[f"{name}_ratio"] is not None and abs(row[f"{name}_ratio"] - 1) <= limit
        ]
        pairs = (f"{row[name][0]:g} / {row[name][1]:g}" for name in TOLERANCE)
        load = f"{row['load']:g}" + (", a kill" if row["killed"] else "")
        table.add_row(str(row["workers"]), load, str(row["requests"]), *pairs, ", ".join(well))
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--kill", action="store_true", help="an encoder, with 2 workers or more")
    args = parser.parse_args()
    console = Console(width=150)
    rows = compare(args, console)
    print_table(rows, console)
    about = {"machine": cpu_info(), "versions": versions("ray", "torch"), "tolerance": TOLERANCE}
    print_result("serving.simulation", {**about, "load_average": psutil.getloadavg(), "rows": rows})


if __name__ == "__main__":
    main()

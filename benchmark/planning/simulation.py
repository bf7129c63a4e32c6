"""The simulator beside real servers whose devices wait: are the latencies the same?

    python -m benchmark.planning.simulation [--workers 1 2 3 4] [--loads 0.3 0.6 0.9 1.2]
        [--seconds 60] [--kinds poisson bursts lengths kill] [--hop S]

The servers are real (`benchmark.planning.timed_workers`), and so are the requests: each has audio
of its own, at the times that the simulator's load draws. Their real times and lengths are then
played to the simulator as a trace. Devices are so slow that the cores of this machine have little
to do.
Two figures are fitted, on runs that are not judged: what a call of a worker takes beside its
device (a light load, one worker of each role), by which all rows are judged, and before each row
with a kill how long a new encoder takes until it encodes (one is killed in that server while it has
nothing else to do).
`--hop` takes the first from an earlier run.

Prints goodput, p50 and p95 of both side by side, their ratios, how long the simulator took, and one
JSON line last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmark.planning.timed_load import PROBE_S, probed, real, simulated
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.server import BenchServer, process_kind, serving
from cluster.planning.profile import (
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
    save_profile,
)
from cluster.planning.scenario import Lengths, Load

ENCODE_S = 0.4  # of a window: one encoder does 2.5 a second
STEP_S, ROW_S = 0.05, 0.0005
ROWS = (1, 16)
ROUTER_S = 0.006  # of a router's processor for a request, as two cores of a Xeon take beside others
LIGHT, MEDIUM = 0.15, 0.6  # loads: of the fit; of bursts, other lengths and kills
CLIPS = Lengths(median_s=5.0, sigma=0.4, max_s=10.0)
WIDE = Lengths(median_s=10.0, sigma=0.7, max_s=28.0)
KINDS = ("poisson", "bursts", "lengths", "kill")
TOLERANCE = {"goodput": 0.05, "p50": 0.10, "p95": 0.20, "worst_s": 0.30}
OWN = (sys.executable, "-m", "benchmark.planning.timed_workers")
QUIET_PROBES = 4  # one after another that are as usual: the encoder is back
USUAL_START_S = 8.0  # of an encoder, where none is killed
CALLS = 2  # of workers, for a request of one window
LEAST_FIT_S = 90.0
STILL_S, TRIES = 1.0, 3  # a run is repeated in which the machine stood still for longer


def slow_profile(hop_s: float, start_s: float) -> Profile:
    """Of the bundled model's shape. hop_s: a call of a worker beside its device."""
    steps = tuple(StepPoint(rows=n, positions=1500, seconds=STEP_S + ROW_S * n) for n in ROWS)
    return Profile(
        name="slow",
        predicted=True,
        source="made up for benchmark.planning.simulation",
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
        router=RouterProfile(request_s=ROUTER_S, window_s=0.0, hop_s=hop_s),
        audio=AudioProfile(request_s=0.004, audio_second_s=0.002),
        start_s=StartProfile(encoder=start_s, decoder=start_s, router=start_s),
    )


def load_of(kind: str, load: float, workers: int, seconds: float) -> Load:
    """Requests at a share of what so many encoders can do; bursts and lengths at their own."""
    rate = load * workers / ENCODE_S
    if kind == "bursts":  # three times as many for a fifth of the time; the same mean
        fields = {"kind": "bursts", "burst_factor": 3.0, "burst_s": 4.0, "period_s": 20.0}
        return Load(rate_per_s=rate / 1.4, seconds=seconds, lengths=CLIPS, **fields)
    lengths = WIDE if kind == "lengths" else CLIPS
    return Load(rate_per_s=rate, seconds=seconds, lengths=lengths)


def fitted_hop_s(server: BenchServer, seconds: float) -> float:
    """Seconds of a call beside its device, by the median of what requests took longer."""
    seen = real(server.url, load_of("poisson", LIGHT, 1, seconds), seed=99)
    bare, _ = simulated(seen, 1, slow_profile(0.0, USUAL_START_S))
    pairs = zip(seen.latencies, bare.latencies, strict=True)
    return max(0.0, median(real_s - bare_s for real_s, bare_s in pairs) / CALLS)


def restart_s(server: BenchServer, workers: int) -> float:
    """Kill an encoder of an idle server: seconds until as many windows are encoded at once.

    A window for each encoder is sent each second. While one is missing, two windows share one, and
    the slower of them takes longer by what a window takes.
    """
    usual_s, *slowest = probed(server.url, workers, lambda: kill_encoder(server))
    is_late = [value > usual_s + ENCODE_S / 2 for value in slowest]
    # A single late one afterwards comes of the choice of workers, which may not spread them evenly.
    for number in range(1, len(is_late) - QUIET_PROBES):
        if any(is_late[:number]) and not any(is_late[number : number + QUIET_PROBES]):
            return PROBE_S * (number - 0.5)  # between the last late probe and the next one
    raise SystemExit("no encoder was missed after one was killed, or none came back")


def kill_encoder(server: BenchServer) -> None:
    """End one of the encoders' processes, as by SIGKILL."""
    for child in server.process.children(recursive=True):
        with suppress(psutil.Error):
            if process_kind(child, server.process) == "encoder":
                child.kill()
                return


def runs_of(args: argparse.Namespace, workers: int) -> Iterator[tuple[str, float]]:
    """Kinds and loads to run with so many workers."""
    if "poisson" in args.kinds:
        yield from (("poisson", load) for load in args.loads)
    yield from ((kind, MEDIUM) for kind in ("bursts", "lengths") if kind in args.kinds)
    if "kill" in args.kinds and workers > 1:
        yield "kill", MEDIUM


def compare(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All runs, each real and simulated."""
    rows: list[dict[str, Any]] = []
    hop_s: float | None = args.hop
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "slow.json")
        save_profile(slow_profile(0.0, USUAL_START_S), file)

        def server_of(workers: int) -> Any:
            counts = ("--encoders", str(workers), "--decoders", str(workers))
            return serving("--profile", str(file), *counts, command=OWN)

        if hop_s is None:
            with server_of(1) as server:
                hop_s = fitted_hop_s(server, max(args.seconds, LEAST_FIT_S))
        console.print(f"fitted: {hop_s:.4f} s a call")
        for workers in args.workers:
            with server_of(workers) as server:
                for kind, load in runs_of(args, workers):
                    start_s = USUAL_START_S
                    if kind == "kill":
                        start_s = restart_s(server, workers)
                        console.print(f"fitted: {start_s:.1f} s to start an encoder")
                    profile = slow_profile(hop_s, start_s)
                    rows.append(compare_one(server, workers, kind, load, args.seconds, profile))
                    console.print(json.dumps(rows[-1]))
    return rows


class Watch:
    """Notes how long this machine stood still: a run in which it did says nothing."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        before = time.monotonic()
        while not self._done.wait(0.1):
            now = time.monotonic()
            self.longest_s = max(self.longest_s, now - before - 0.1)
            before = now


def compare_one(
    server: BenchServer, workers: int, kind: str, load: float, seconds: float, profile: Profile
) -> dict[str, Any]:
    """One run of a server, played to the simulator."""
    kill_at_s = seconds / 2 if kind == "kill" else None
    requests = load_of(kind, load, workers, seconds)

    def begin() -> None:
        if kill_at_s is not None:
            threading.Timer(kill_at_s, kill_encoder, (server,)).start()

    for _ in range(TRIES):
        psutil.cpu_times_percent(None)
        with Watch() as watch:
            seen = real(server.url, requests, round(100 * load) + 1000 * workers, begin)
        if watch.longest_s < STILL_S:
            break
    told, took_s = simulated(seen, workers, profile, kill_at_s)
    busy = 100.0 - psutil.cpu_times_percent(None).idle
    row: dict[str, Any] = {
        "workers": workers,
        "kind": kind,
        "load": load,
        "requests": len(seen.starts),
        "failed": [seen.n_failed, told.n_failed],
        "run_s": round(max(seen.starts), 1),
        "simulator_s": round(took_s, 2),
        "machine_busy": round(busy / 100, 2),
        "stood_still_s": round(watch.longest_s, 2),
        "fitted": {"hop_s": profile.router.hop_s, "start_s": profile.start_s.encoder},
    }
    span_s = max(seen.starts) + 1.0
    theirs, ours = seen.figures(span_s), told.figures(span_s)
    if kill_at_s is not None:
        theirs |= seen.dip(kill_at_s)
        ours |= told.dip(kill_at_s)
    for name, value in theirs.items():
        row[name] = [round(value, 3), round(ours[name], 3)]
        row[f"{name}_ratio"] = round(ours[name] / value, 3) if value else None
    return row


def print_table(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="real / simulated; seconds, good requests per second")
    for column in ("workers", "kind", "load", "requests", *TOLERANCE, "beyond tolerance"):
        table.add_column(column)
    for row in rows:
        beyond = [
            f"{name} {row[f'{name}_ratio']:g}"
            for name, limit in TOLERANCE.items()
            if row.get(f"{name}_ratio") is not None and abs(row[f"{name}_ratio"] - 1) > limit
        ]
        pairs = [
            f"{row[name][0]:g} / {row[name][1]:g}" if name in row else "" for name in TOLERANCE
        ]
        head = (str(row["workers"]), row["kind"], f"{row['load']:g}", str(row["requests"]))
        table.add_row(*head, *pairs, ", ".join(beyond))
    console.print(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--hop", type=float, help="seconds of a call, fitted earlier")
    args = parser.parse_args()
    console = Console(width=150)
    rows = compare(args, console)
    print_table(rows, console)
    about = {"machine": cpu_info(), "versions": versions("ray", "torch"), "tolerance": TOLERANCE}
    print_result(
        "planning.simulation", {**about, "load_average": psutil.getloadavg(), "rows": rows}
    )


if __name__ == "__main__":
    main()

"""The simulator beside real servers whose devices wait: are the latencies the same?

    python -m benchmark.planning.simulation [--workers 1 2 3 4] [--loads 0.3 0.6 0.9 1.2]
        [--seconds 60]

The servers are real (`benchmark.planning.timed_workers`), and so are the requests: each has audio
of its own, at the times that the simulator's load draws; their real times and lengths are then
simulated. Devices are so slow that the cores of this machine have little to do. One figure is
fitted, on a light load that is not judged: what a call of a worker takes beside its device.

Prints goodput, p50 and p95 of both side by side, their ratios, how long the simulator took, and one
JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmark.shared.clips import Clip
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.openai_client import Client, Upload, form_fields
from benchmark.shared.server import BenchServer, serving
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import sample_path
from cluster.planning.profile import Profile, load_profile
from cluster.planning.report import at_percentile
from cluster.planning.scenario import Arrival, Lengths, Load, arrivals, make_scenario
from cluster.planning.simulate import simulate

ENCODE_S = 0.4  # of a window: one encoder does 2.5 a second
STEP_S, ROW_S = 0.05, 0.0005
ROWS = (1, 16)
ROUTER_S = 0.006  # of a router's processor for a request, as two cores of a Xeon take beside others
LIGHT, MEDIUM = 0.15, 0.6  # loads: of the fit; of wider lengths
CLIPS = Lengths(median_s=5.0, sigma=0.4, max_s=10.0)
WIDE = Lengths(median_s=10.0, sigma=0.7, max_s=28.0)
SLO_S, SLO_PER_AUDIO_S = 2.0, 0.2  # 3 s for a clip of 5 s
FIGURES = ("goodput", "p50", "p95")
OWN = (sys.executable, "-m", "benchmark.planning.timed_workers")
CALLS = 2  # of workers, for a request of one window
LEAST_FIT_S = 90.0


def slow_profile(hop_s: float) -> Profile:
    """Of the bundled model's shape. hop_s: a call of a worker beside its device."""
    steps = [{"size": n, "positions": 1500, "seconds": STEP_S + ROW_S * n} for n in ROWS]
    points = [{"size": 1, "positions": 1500, "seconds": ENCODE_S}]
    sizes = {"max_batch": 1, "export_windows": 16, "overlaps": True}
    return Profile.model_validate(
        load_profile("two-cores").model_dump()
        | {
            "name": "slow",
            "predicted": True,
            "source": "made up for benchmark.planning.simulation",
            "page_frames": 1500,
            "encoder": {"points": points, **sizes},
            "decoder": {"steps": steps, "prefills": steps, "max_batch": 16, "kv_windows": 16},
            "handoff": {"transport": "nixl", "latency_s": 0.002, "bytes_per_s": 3e9},
            "router": {"request_s": ROUTER_S, "window_s": 0.0, "hop_s": hop_s},
            "audio": {"request_s": 0.004, "audio_second_s": 0.002},
        }
    )


def load_of(kind: str, load: float, workers: int, seconds: float) -> Load:
    """Requests at a share of what so many encoders can do."""
    rate, lengths = load * workers / ENCODE_S, WIDE if kind == "lengths" else CLIPS
    return Load(rate_per_s=rate, seconds=seconds, lengths=lengths)


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests that were answered: each one's start, audio and latency in seconds, by start."""

    rows: list[tuple[float, float, float]]
    n_failed: int

    def figures(self, seconds: float) -> dict[str, float]:
        latencies = [latency for _, _, latency in self.rows]
        good = sum(late <= SLO_S + SLO_PER_AUDIO_S * audio_s for _, audio_s, late in self.rows)
        p50, p95 = at_percentile(latencies, 50), at_percentile(latencies, 95)
        return dict(zip(FIGURES, (good / seconds, p50, p95), strict=True))


async def real(url: str, load: Load, seed: int) -> Seen:
    """Send the requests of a load to a server, each at its time, and wait for all answers.

    Each is speech with noise of its own, so that no two of them are the same audio.
    """
    requests = list(arrivals(load, Random(seed)))
    pcm = np.clip(Clip("long", sample_path("long")).pcm(), -32_767, 32_766)
    noise = np.random.default_rng(seed).integers(-1, 2, len(pcm) + len(requests), dtype=np.int16)
    failed: list[str] = []
    rows: list[tuple[float, float, float]] = []

    def upload(number: int, audio_s: float) -> Upload:
        n = min(len(pcm), round(audio_s * SAMPLE_RATE))
        audio = wav_bytes(pcm[:n] + noise[number : number + n])
        return Upload.of(audio, "audio.wav", form_fields("whisper-1", "en", {}))

    async def one(client: Client, number: int, at_s: float, audio_s: float) -> None:
        made = upload(number, audio_s)
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        sent_s = time.perf_counter()
        outcome = await client.send(made)
        if outcome.failure:
            failed.append(outcome.failure)
        else:
            rows.append((sent_s - began, audio_s, outcome.latency))

    async with Client(url) as client:
        for number in range(2):  # warm-up
            await client.send(upload(number, 3.0))
        began = time.perf_counter()
        await asyncio.gather(*(one(client, n, r.at_s, r.audio_s) for n, r in enumerate(requests)))
    return Seen(sorted(rows), len(failed))


def simulated(seen: Seen, workers: int, profile: Profile) -> Seen:
    """The same arrivals in the simulator."""
    fields = {
        "cluster": {"encoders": workers, "decoders": workers},
        "load": {"seconds": seen.rows[-1][0] + 1.0},
    }
    played: list[Arrival] = [(at_s, audio_s, "interactive") for at_s, audio_s, _ in seen.rows]
    outcome = simulate(make_scenario(fields), profile, rows=played)
    rows = outcome.records.answers["interactive"]
    answered = sorted(row for row in rows if row[2] < math.inf)
    return Seen(answered, len(rows) - len(answered))


def fitted_hop_s(server: BenchServer, seconds: float) -> float:
    """Seconds of a call beside its device, by the median of what requests took longer."""
    seen = asyncio.run(real(server.url, load_of("clips", LIGHT, 1, seconds), seed=99))
    bare = simulated(seen, 1, slow_profile(0.0))
    pairs = zip(seen.rows, bare.rows, strict=True)
    return max(0.0, median(ours[2] - theirs[2] for ours, theirs in pairs) / CALLS)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "slow.json")
        file.write_text(slow_profile(0.0).model_dump_json())

        def server_of(workers: int) -> Any:
            counts = ("--encoders", str(workers), "--decoders", str(workers))
            return serving("--profile", str(file), *counts, command=OWN)

        with server_of(1) as server:
            hop_s = fitted_hop_s(server, max(args.seconds, LEAST_FIT_S))
        print(f"fitted: {hop_s:.4f} s a call")
        for workers in args.workers:
            with server_of(workers) as server:
                for kind, load in [*(("clips", load) for load in args.loads), ("lengths", MEDIUM)]:
                    requests = load_of(kind, load, workers, args.seconds)
                    seed = round(100 * load) + 1000 * workers
                    rows.append(compare_one(server.url, workers, kind, load, requests, seed, hop_s))
                    print(json.dumps(rows[-1]))
    return rows


def compare_one(
    url: str, workers: int, kind: str, load: float, requests: Load, seed: int, hop_s: float
) -> dict[str, Any]:
    psutil.cpu_times_percent(None)
    seen = asyncio.run(real(url, requests, seed))
    busy, began = 100.0 - psutil.cpu_times_percent(None).idle, time.perf_counter()
    told = simulated(seen, workers, slow_profile(hop_s))
    row: dict[str, Any] = {
        "workers": workers,
        "kind": kind,
        "load": load,
        "requests": len(seen.rows),
        "failed": [seen.n_failed, told.n_failed],
        "simulator_s": round(time.perf_counter() - began, 2),
        "machine_busy": round(busy / 100, 2),
        "hop_s": hop_s,
    }
    span_s = seen.rows[-1][0] + 1.0
    theirs, ours = seen.figures(span_s), told.figures(span_s)
    for name, value in theirs.items():
        row[name] = [round(value, 3), round(ours[name], 3)]
        row[f"{name}_ratio"] = round(ours[name] / value, 3) if value else None
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9, 1.2])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    args = parser.parse_args()
    rows = compare(args)
    print_table(rows, "real, simulated; good requests per second, seconds")
    about = {"machine": cpu_info(), "versions": versions("ray", "torch")}
    print_result(
        "planning.simulation", {**about, "load_average": psutil.getloadavg(), "rows": rows}
    )


if __name__ == "__main__":
    main()

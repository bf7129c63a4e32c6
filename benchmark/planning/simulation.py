"""The simulator beside real servers whose devices only wait: are the latencies the same?

    python -m benchmark.planning.simulation [--workers 1 2 3 4] [--seconds 60]

All of a server but its models is real. A model's forward is a wait for the time in the profile,
which uses no core. Each request has audio of its own; its real time and length are then simulated.
One figure is fitted, on a light load that is not judged: the time of a worker's call besides its
device. Prints goodput, p50 and p95 of both side by side, their ratios, and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from functools import partial
from random import Random
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmark.shared.clips import Clip
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.openai_client import Client, Upload, form_fields
from benchmark.shared.own_server import pool, serve_until_signal, with_router
from benchmark.shared.server import BenchServer, serving
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings, Settings
from cluster.demo.samples import sample_path
from cluster.planning.devices import Device, WaitingForward, WaitingRunner
from cluster.planning.profile import Profile, load_profile
from cluster.planning.scenario import Arrival, Lengths, Load, Scenario, arrivals, at_percentile
from cluster.planning.simulate import simulate
from cluster.serve.placement import Placement
from cluster.serve.replicas.pool_replicas import DecoderReplica, EncoderReplica

ENCODE_S = 0.4  # of a window: one encoder does 2.5 a second
STEP_S, ROW_S = 0.05, 0.0005
ROWS = (1, 16)
ROUTER_S = 0.006  # a router's processor time for a request, on two cores of a busy Xeon
LIGHT, MEDIUM = 0.15, 0.6  # loads: of the fit; of wider lengths
LOADS = (0.3, 0.6, 0.9, 1.2)
CLIPS = Lengths(median_s=5.0, sigma=0.4, max_s=10.0)
WIDE = Lengths(median_s=10.0, sigma=0.7, max_s=28.0)
SLO_S, SLO_PER_AUDIO_S = 2.0, 0.2  # 3 s for a clip of 5 s
OWN = (sys.executable, "-m", "benchmark.planning.simulation")
CALLS = 2  # of workers, for a request of one window
LEAST_FIT_S = 90.0

Seen = list[tuple[float, float, float]]  # of each request, its start, audio and latency in seconds


def slow_profile(hop_s: float = 0.0) -> Profile:
    """Return a profile of the bundled model; `hop_s` is the time of a call besides its device."""
    steps = [{"size": n, "positions": 1500, "seconds": STEP_S + ROW_S * n} for n in ROWS]
    points = [{"size": 1, "positions": 1500, "seconds": ENCODE_S}]
    sizes = {"max_batch": 1, "export_windows": 16}
    changes = {
        "page_frames": 1500,
        "encoder": {"points": points, **sizes},
        "decoder": {"steps": steps, "prefills": steps, "max_batch": 16, "kv_windows": 16},
        "handoff": {"transport": "nixl", "latency_s": 0.002, "bytes_per_s": 3e9},
        "router": {"request_s": ROUTER_S, "hop_s": hop_s},
    }
    return Profile.model_validate(load_profile("two-cores").model_dump() | changes)


class RealClock:
    now = staticmethod(time.monotonic)

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - time.monotonic()))


class TimedEncoder(EncoderReplica):
    """A real encoder replica whose device is replaced once its thread runs."""

    def __init__(self, settings: Settings, build: str) -> None:
        super().__init__(settings, build)
        clock: Any = RealClock()
        loop: Any = self._engine._loops[0]
        loop.forward.close()
        loop.forward = WaitingForward(slow_profile(), Device(), clock)


class TimedDecoder(DecoderReplica):
    def __init__(self, settings: Settings, build: str) -> None:
        super().__init__(settings, build)
        clock: Any = RealClock()
        tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(settings.model, weights=False))
        runner = WaitingRunner(slow_profile(), tokenizer, Device(), clock)
        loop: Any = self._engine._loop
        loop._runner = loop._launches._runner = runner


def build_timed(workers: int, settings: Settings, build: str, placement: Placement) -> Any:
    pools = {
        "encoder": pool(TimedEncoder, "encoder", workers, 4),
        "decoder": pool(TimedDecoder, "decoder", workers, settings.decoder.max_waiting + 16),
    }
    bound = {role: one.bind(settings, build) for role, one in pools.items()}
    return with_router(settings, build, bound)


def serve(workers: int, port: int) -> None:
    settings = Settings.model_validate(
        {
            "router": RouterSettings(port=port),
            "encoder": {"context": "full", "cache": False, "max_batch": 1},
            "log_level": "WARNING",
        }
    )
    serve_until_signal(settings, partial(build_timed, workers))


async def real(url: str, load: Load, seed: int) -> tuple[Seen, int]:
    """Send the requests of a load, each with audio of its own at its time. Return those that were
    answered, by start, and the number of those that failed.
    """
    requests = list(arrivals(load, Random(seed)))
    pcm = np.clip(Clip("long", sample_path("long")).pcm(), -32_767, 32_766)
    noise = np.random.default_rng(seed).integers(-1, 2, len(pcm) + len(requests), dtype=np.int16)
    rows: Seen = []

    def upload(number: int, audio_s: float) -> Upload:
        n = min(len(pcm), round(audio_s * SAMPLE_RATE))
        audio = wav_bytes(pcm[:n] + noise[number : number + n])
        return Upload.of(audio, "audio.wav", form_fields("whisper-1", "en"))

    async def one(client: Client, number: int, at_s: float, audio_s: float) -> None:
        made = upload(number, audio_s)
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        sent_s = time.perf_counter()
        outcome = await client.send(made)
        if not outcome.failure:
            rows.append((sent_s - began, audio_s, outcome.latency))

    async with Client(url) as client:
        for number in range(2):  # warm-up
            await client.send(upload(number, 3.0))
        began = time.perf_counter()
        await asyncio.gather(*(one(client, n, r.at_s, r.audio_s) for n, r in enumerate(requests)))
    return sorted(rows), len(requests) - len(rows)


def simulated(seen: Seen, workers: int, hop_s: float) -> Seen:
    """Simulate the same arrivals; a failed one has an infinite latency."""
    fields = {
        "load": {"seconds": seen[-1][0] + 1.0},
        "settings": {  # as those that `serve` has
            "encoder": {"context": "full", "replicas": workers},
            "decoder": {"replicas": workers},
        },
    }
    played: list[Arrival] = [(at_s, audio_s, "interactive") for at_s, audio_s, _ in seen]
    outcome = simulate(Scenario.model_validate(fields), slow_profile(hop_s), rows=played)
    return sorted(outcome.answers["interactive"])


def figures(seen: Seen, seconds: float) -> dict[str, float]:
    latencies = [late for _, _, late in seen if late < math.inf]
    good = sum(late <= SLO_S + SLO_PER_AUDIO_S * audio_s for _, audio_s, late in seen)
    p50, p95 = at_percentile(latencies, 50), at_percentile(latencies, 95)
    return {"goodput": good / seconds, "p50": p50, "p95": p95}


def fitted_hop_s(server: BenchServer, seconds: float) -> float:
    """Fit the seconds of a call besides its device, by the median excess of real requests."""
    load = Load(rate_per_s=LIGHT / ENCODE_S, seconds=seconds, lengths=CLIPS)
    seen, _ = asyncio.run(real(server.url, load, seed=99))
    pairs = zip(seen, simulated(seen, 1, 0.0), strict=True)
    return max(0.0, median(ours[2] - theirs[2] for ours, theirs in pairs) / CALLS)


def compare(
    url: str, workers: int, kind: str, load: float, seconds: float, hop_s: float
) -> dict[str, Any]:
    """Compare both at `load`, a share of what so many encoders can do."""
    psutil.cpu_times_percent(None)
    rate, lengths = load * workers / ENCODE_S, WIDE if kind == "lengths" else CLIPS
    asked = Load(rate_per_s=rate, seconds=seconds, lengths=lengths)
    seen, n_failed = asyncio.run(real(url, asked, round(100 * load) + 1000 * workers))
    busy = 100.0 - psutil.cpu_times_percent(None).idle
    told = simulated(seen, workers, hop_s)
    row: dict[str, Any] = {
        "workers": workers,
        "kind": kind,
        "load": load,
        "failed": [n_failed, sum(late == math.inf for _, _, late in told)],
        "machine_busy": round(busy / 100, 2),
        "hop_s": hop_s,
    }
    span_s = seen[-1][0] + 1.0
    ours = figures(told, span_s)
    for name, value in figures(seen, span_s).items():
        row[name] = [round(value, 3), round(ours[name], 3)]
        row[f"{name}_ratio"] = round(ours[name] / value, 3) if value else None
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--serve", type=int, metavar="WORKERS", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.port)
        return
    rows: list[dict[str, Any]] = []
    with serving("--serve", "1", command=OWN) as server:
        hop_s = fitted_hop_s(server, max(args.seconds, LEAST_FIT_S))
    print(f"fitted: {hop_s:.4f} s a call")
    for workers in args.workers:
        with serving("--serve", str(workers), command=OWN) as server:
            for kind, load in [*(("clips", load) for load in LOADS), ("lengths", MEDIUM)]:
                rows.append(compare(server.url, workers, kind, load, args.seconds, hop_s))
                print(json.dumps(rows[-1]))
    print_table(rows, "real, simulated; good requests per second, seconds")
    print_result("planning.simulation", {**cpu_info(), **versions("ray", "torch"), "rows": rows})


if __name__ == "__main__":
    from benchmark.planning import simulation  # so that replicas import its classes by name

    simulation.main()

"""What a request costs outside of queue, encode and decode: router, proxy, audio, hand-off.

Three clusters run side by side and take turns: Ray Serve's default mode and its
throughput-optimised one, both behind Serve's proxy, and the latter with routers that listen
themselves, which is what `splitscribe serve` does. All requests have the same audio, and encoders
keep nothing (`encoder.cache: false`). The ceiling is a bare uvicorn + Starlette
process that reads the same upload.

    python -m benchmark.serving.overhead [--rounds 5] [--requests 40]

Prints wall time per stage (p50, p95), CPU milliseconds per request of router, proxy and audio
workers, at 1 and 32 requests in flight, and one JSON line last.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmark.shared.bare_server import bare_uvicorn
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.openai_client import Client, Outcome, Upload, send_all
from benchmark.shared.server import BenchServer, cpu_ms_each, serving
from cluster.demo.samples import sample_path
from cluster.demo.showcase import STAGES, parse_server_timing

MODES = {
    mode: {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": optimised,
        "SPLITSCRIBE_ROUTER__LISTENER": listener,
        "SPLITSCRIBE_ENCODER__CACHE": "false",  # the same clip each time, which is to be encoded
    }
    for mode, optimised, listener in (
        ("default", "0", "serve"),
        ("throughput", "1", "serve"),
        ("throughput, no proxy", "1", "router"),
    )
}
IN_FLIGHT = (1, 32)
CPU_KINDS = ("router", "proxy", "audio")


@dataclass
class Sample:
    """All rounds of one mode at one number in flight. Times in ms."""

    wall: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)  # wall less queue, encode and decode
    stages: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)  # per request, one value a round
    rate: list[float] = field(default_factory=list)  # requests/s, one value a round


async def load(url: str, n_requests: int, in_flight: int) -> list[Outcome]:
    """Send the short recording `n_requests` times."""
    fields = {"model": "whisper-1", "language": "en"}
    upload = Upload.of(sample_path("short").read_bytes(), "short.flac", fields)
    async with Client(url) as client:
        outcomes = await send_all(client, [upload] * n_requests, in_flight)
    failed = [outcome for outcome in outcomes if outcome.failure]
    if failed:
        raise SystemExit(f"a request failed: {failed[0].failure} {failed[0].error}")
    return outcomes


def measure(server: BenchServer, sample: Sample, n_requests: int, in_flight: int) -> None:
    """One round: add its values to `sample`."""
    before_s, began = server.cpu_s(), time.perf_counter()
    outcomes = asyncio.run(load(server.url, n_requests, in_flight))
    sample.rate.append(n_requests / (time.perf_counter() - began))
    used_ms = cpu_ms_each(before_s, server.cpu_s(), n_requests)
    for kind in CPU_KINDS:
        sample.cpu.setdefault(kind, []).append(used_ms.get(kind, 0.0))
    for outcome in outcomes:
        wall_ms, stages = 1000 * outcome.latency, parse_server_timing(outcome.server_timing)
        sample.wall.append(wall_ms)
        inside_ms = sum(stages.get(stage, 0.0) for stage in ("queue", "encode", "decode"))
        sample.outside.append(wall_ms - inside_ms)
        for stage in STAGES:
            sample.stages.setdefault(stage, []).append(stages.get(stage, 0.0))


def bare_ms(n_requests: int, in_flight: int) -> float:
    """Median wall time of the same upload against a bare server in one process."""
    with bare_uvicorn() as server:
        answers = asyncio.run(load(server.url, n_requests, in_flight))
    return statistics.median(1000 * outcome.latency for outcome in answers)


def percentile(values: list[float], percent: float) -> float:
    return float(np.percentile(values, percent))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=40, help="per round")
    args = parser.parse_args()
    console = Console(width=160)
    samples = {(mode, n): Sample() for mode in MODES for n in IN_FLIGHT}
    ceiling = {n: bare_ms(args.requests, n) for n in IN_FLIGHT}
    for n, ms in ceiling.items():
        console.print(
            f"ceiling: bare uvicorn reads the upload in {ms:.1f} ms (median, {n} in flight)"
        )
    with ExitStack() as stack:
        servers = {
            mode: stack.enter_context(serving("--log-level", "WARNING", env=environment))
            for mode, environment in MODES.items()
        }
        for server in servers.values():  # warm-up
            asyncio.run(load(server.url, 8, 4))
        for _ in range(args.rounds):
            for n in IN_FLIGHT:
                for mode, server in servers.items():
                    measure(server, samples[mode, n], args.requests, n)
    table = Table(title="5 s clip; wall ms p50 / p95 per stage, CPU ms per request")
    for column in ("mode", "in flight", "req/s", "wall", "outside", *STAGES):
        table.add_column(column, no_wrap=True)
    for kind in CPU_KINDS:
        table.add_column(f"cpu {kind}")
    report = []
    for (mode, n), sample in samples.items():
        pair = [
            f"{percentile(values, 50):.0f} / {percentile(values, 95):.0f}"
            for values in (sample.wall, sample.outside, *(sample.stages[s] for s in STAGES))
        ]
        cpu = {kind: statistics.median(sample.cpu[kind]) for kind in CPU_KINDS}
        rate = statistics.median(sample.rate)
        table.add_row(mode, str(n), f"{rate:.1f}", *pair, *(f"{ms:.1f}" for ms in cpu.values()))
        report.append(
            {
                "mode": mode,
                "in_flight": n,
                "requests_per_s": round(rate, 2),
                "wall_ms_p50": round(percentile(sample.wall, 50), 2),
                "wall_ms_p95": round(percentile(sample.wall, 95), 2),
                "outside_ms_p50": round(percentile(sample.outside, 50), 2),
                "outside_ms_p95": round(percentile(sample.outside, 95), 2),
                "cpu_ms": {kind: round(ms, 2) for kind, ms in cpu.items()},
                "bare_ms_p50": round(ceiling[n], 2),
            }
        )
    console.print(table)
    print_result("overhead", {"rows": report})


if __name__ == "__main__":
    main()

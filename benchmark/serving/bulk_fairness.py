"""What bulk work costs those who wait for an answer, and how much of the rest it gets, by its caps.

    python -m benchmark.serving.bulk_fairness [--caps 1:0.25 1:0.5 2:0.5 8:1] [--rounds 2]

For each pair of `encoder.bulk_windows` and `decoder.bulk_share` a server of its own. First what it
can do: requests of one short clip in a closed loop, and bulk work alone. Then that clip by Poisson
arrivals at half of the first server's capacity, by turns without and with bulk work, which runs in
a process of its own as that of `splitscribe batch` does. What the clips leave is told in two ways,
each of the fastest bulk work alone: the other half of the load, and the share of the cores' time
that was idle while the clips ran alone. The second is less, since clips that arrive one by one
cost more than clips that share batches and steps. Bulk's share of either is the ceiling 1. The aim
is that the clips' 95th percentile rises by at most 15 % while bulk work has at least 80 %.

Encoders keep nothing (`encoder.cache: false`), since all requests have the same audio. Prints a
table and one JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmark.serving.load import arrival_offsets, send_load
from benchmark.shared.bulk_work import FORM, BulkLoad, write_talks
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.openai_client import Client, Outcome, Upload
from benchmark.shared.server import BenchServer, serving
from cluster.demo.samples import sample_path
from cluster.demo.showcase import parse_server_timing

IN_FLIGHT = 8
SETTLE_S = 3.0  # after bulk work has begun, before anything counts
FILES, FILE_S = 8, 120.0
PERCENTILE = 95
LOAD = 0.5  # of capacity


@dataclass(slots=True)
class Found:
    """What one pair of caps came to; a value a round.

    alone_ms, beside_ms: the clips' 95th percentile without bulk work and beside it. bulk_alone,
    bulk_beside: hours of audio in an hour. stages: alone and beside, of each stage of a clip that
    the server tells its median and 95th percentile over all rounds, in ms. cores: alone and beside,
    of each kind of process how many cores it had. idle: while clips ran alone, of all cores' time.
    """

    caps: tuple[int, float]
    alone_ms: list[float] = field(default_factory=list)
    beside_ms: list[float] = field(default_factory=list)
    bulk_alone: list[float] = field(default_factory=list)
    bulk_beside: list[float] = field(default_factory=list)
    stages: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cores: dict[str, dict[str, float]] = field(default_factory=dict)
    idle: float = 0.0

    @property
    def rise(self) -> float:
        """Of the clips' 95th percentile, as a share."""
        return statistics.median(self.beside_ms) / statistics.median(self.alone_ms) - 1

    def share(self, fastest: float, left: float) -> float:
        """Of what the clips leave of the fastest bulk work: of `left`, a share of it."""
        return statistics.median(self.bulk_beside) / (left * fastest)


@dataclass(slots=True)
class Spent:
    """Where the time of clips went, over some runs. stages: ms of each clip."""

    stages: dict[str, list[float]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0
    idle_s: float = 0.0  # of all cores

    def note(self, stages: Mapping[str, float]) -> None:
        for stage, ms in stages.items():
            self.stages.setdefault(stage, []).append(ms)

    def percentiles(self) -> dict[str, list[float]]:
        return {
            stage: [round(float(np.percentile(values, q)), 1) for q in (50, PERCENTILE)]
            for stage, values in self.stages.items()
        }

    def cores(self) -> dict[str, float]:
        return {kind: round(cpu_s / self.wall_s, 2) for kind, cpu_s in self.cpu_s.items()}

    def idle(self) -> float:
        """Of all cores' time."""
        return self.idle_s / (self.wall_s * psutil.cpu_count())


@dataclass(slots=True)
class Clips:
    """The clips' client. rate: arrivals a second, once it is known."""

    server: BenchServer
    client: Client
    upload: Upload
    seconds: float
    rate: float = 0.0
    n_runs: int = 0

    async def capacity(self) -> float:
        """Requests a second in a closed loop."""
        await self._send(range(2 * IN_FLIGHT))
        began = time.perf_counter()
        n = len(await self._send(range(4 * IN_FLIGHT)))
        wanted = max(n, round(self.seconds * n / (time.perf_counter() - began)))
        began = time.perf_counter()
        await self._send(range(wanted))
        return wanted / (time.perf_counter() - began)

    async def run(self, spent: Spent) -> float:
        """One run at `rate`; the 95th percentile of its latencies, in ms."""
        began, cpu_s, idle_s = time.perf_counter(), self.server.cpu_s(), psutil.cpu_times().idle
        n = max(20, round(self.seconds * self.rate))
        self.n_runs += 1
        offsets = arrival_offsets(n, self.rate, 1.0, self.n_runs)
        outcomes = await send_load(self.client, lambda _: self.upload, range(n), None, offsets)
        _check(outcomes)
        for one in outcomes:
            spent.note({"all": 1000 * one.latency, **parse_server_timing(one.server_timing)})
        spent.wall_s += time.perf_counter() - began
        spent.idle_s += psutil.cpu_times().idle - idle_s
        for kind, now_s in self.server.cpu_s().items():
            spent.cpu_s[kind] = spent.cpu_s.get(kind, 0.0) + now_s - cpu_s.get(kind, 0.0)
        return float(np.percentile([1000 * one.latency for one in outcomes], PERCENTILE))

    async def _send(self, numbers: range) -> list[Outcome]:
        outcomes = await send_load(self.client, lambda _: self.upload, numbers, IN_FLIGHT)
        _check(outcomes)
        return outcomes


def _check(outcomes: Sequence[Outcome]) -> None:
    if failed := [one for one in outcomes if one.failure]:
        raise SystemExit(f"a request failed: {failed[0].failure} {failed[0].error}")


async def bulk_speed(bulk: BulkLoad, seconds: float) -> float:
    """Hours of audio in an hour, of bulk work that runs already."""
    began, before_s = time.perf_counter(), bulk.done_s
    await asyncio.sleep(seconds)
    return (bulk.done_s - before_s) / (time.perf_counter() - began)


async def measure(
    server: BenchServer,
    bulk: BulkLoad,
    caps: tuple[int, float],
    rate: float,
    args: argparse.Namespace,
) -> tuple[Found, float]:
    """What a server comes to, and the rate of the clips; 0 for `rate`: half of what it can do."""
    found, alone, beside = Found(caps), Spent(), Spent()
    upload = Upload.of(sample_path("short").read_bytes(), "short.flac", dict(FORM))
    async with Client(server.url) as client:
        clips = Clips(server, client, upload, args.seconds)
        capacity = await clips.capacity()
        clips.rate = rate or LOAD * capacity
        print(f"caps {caps}: {capacity:.1f} clips/s at most, {clips.rate:.1f} arrive", flush=True)
        for _ in range(args.rounds):
            found.alone_ms.append(await clips.run(alone))
            bulk.start()
            await asyncio.sleep(SETTLE_S)
            found.bulk_alone.append(await bulk_speed(bulk, args.seconds / 2))
            began, before_s = time.perf_counter(), bulk.done_s
            found.beside_ms.append(await clips.run(beside))
            found.bulk_beside.append((bulk.done_s - before_s) / (time.perf_counter() - began))
            await asyncio.to_thread(bulk.stop)
            print(
                f"  p95 {found.alone_ms[-1]:.0f} and {found.beside_ms[-1]:.0f} ms, bulk work "
                f"{found.bulk_alone[-1]:.0f} and {found.bulk_beside[-1]:.0f}",
                flush=True,
            )
    found.stages = {"alone": alone.percentiles(), "beside": beside.percentiles()}
    found.idle = alone.idle()
    found.cores = {"alone": alone.cores(), "beside": beside.cores()}
    return found, clips.rate


def table_of(all_found: Sequence[Found]) -> Table:
    fastest = max(statistics.median(one.bulk_alone) for one in all_found)
    table = Table(
        "bulk windows",
        "bulk share",
        "p95 alone, ms",
        "p95 beside, ms",
        "rise",
        "bulk alone",
        "bulk beside",
        "of the other half",
        "of idle cores",
        title="Clips at half of capacity; bulk in hours of audio per hour",
    )
    for one in all_found:
        medians = [
            f"{statistics.median(values):.1f}"
            for values in (one.alone_ms, one.beside_ms, one.bulk_alone, one.bulk_beside)
        ]
        table.add_row(
            *map(str, one.caps),
            *medians[:2],
            f"{100 * one.rise:+.0f} %",
            *medians[2:],
            f"{100 * one.share(fastest, 1 - LOAD):.0f} %",
            f"{100 * one.share(fastest, one.idle):.0f} %",
        )
    return table


def stages_of(found: Found) -> Table:
    """Where the time of clips goes, and which processes have the cores."""
    table = Table("", "alone", "beside", title=f"Caps {found.caps}: ms at p50 and p95, and cores")
    for what in (found.stages, found.cores):
        for name, value in what["alone"].items():
            table.add_row(name, str(value), str(what["beside"].get(name, "")))
    return table


def parse_caps(text: str) -> tuple[int, float]:
    windows, _, share = text.partition(":")
    return int(windows), float(share)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--caps",
        nargs="+",
        type=parse_caps,
        default=[(1, 0.25), (1, 0.5), (2, 0.5), (8, 1.0)],
        metavar="WINDOWS:SHARE",
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run")
    parser.add_argument("--at-once", type=int, default=8, help="files of bulk work")
    args = parser.parse_args()
    all_found: list[Found] = []
    rate = 0.0
    with tempfile.TemporaryDirectory() as folder:
        files = write_talks(Path(folder), FILES, FILE_S)
        for windows, share in args.caps:
            env = {
                "SPLITSCRIBE_ENCODER__CACHE": "false",
                "SPLITSCRIBE_LOG_LEVEL": "WARNING",
                "SPLITSCRIBE_ENCODER__BULK_WINDOWS": str(windows),
                "SPLITSCRIBE_DECODER__BULK_SHARE": str(share),
            }
            with serving(args.model, "--dtype", args.dtype, env=env) as server:
                bulk = BulkLoad(server.ray_address(), files, args.at_once)
                try:
                    found, rate = asyncio.run(measure(server, bulk, (windows, share), rate, args))
                finally:
                    bulk.close()
            all_found.append(found)
    Console(width=120).print(table_of(all_found))
    for one in all_found:
        Console(width=120).print(stages_of(one))
    figures = {"rate": rate, "caps": [asdict(one) for one in all_found]}
    print_result("bulk_fairness", {**cpu_info(), **versions("torch"), **vars(args), **figures})


if __name__ == "__main__":
    main()

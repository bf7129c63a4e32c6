"""Where the router saturates, and what a request costs it.

    python -m benchmark.serving.scaling [--rounds 5] [--requests 200]

The workers answer at once (`benchmark.serving.instant`), the upload is the 5 s clip. First the
ceilings, a bare uvicorn and a bare Serve ingress that read the same upload; then the real router,
and behind Serve's proxy too. All of them are up at the same time and take turns. Everything shares
this machine's cores, the client too: so the CPU time per request says what one router could carry,
and requests/s what these cores did.

Prints CPU milliseconds per request by kind of process, requests/s, and one JSON line last.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

from benchmark.shared.bare_server import BareServer, bare_uvicorn
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.openai_client import Client, Upload, form_fields, send_all
from benchmark.shared.server import BenchServer, cpu_ms_each, serving
from cluster.demo.samples import sample_path

IN_FLIGHT = (1, 4, 16, 64)
CPU_KINDS = ("bare", "router", "proxy", "audio", "encoder", "decoder", "other", "client")
IDLE_S = 10.0
TARGET_MS = 8.0  # of router and proxy
TARGET_PER_S = 150.0
OWN = (sys.executable, "-m", "benchmark.serving.instant")

Server = BareServer | BenchServer


def instant(*flags: str) -> AbstractContextManager[BenchServer]:
    return serving("--log-level", "WARNING", *flags, command=OWN)


CONFIGURATIONS: Mapping[str, Any] = {
    "ceiling: bare uvicorn": bare_uvicorn,
    "ceiling: bare Serve ingress": lambda: instant("--bare"),
    "router": lambda: instant(),
    "router behind Serve's proxy": lambda: instant("--listener", "serve"),
}


@dataclass
class Sample:
    requests_per_s: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)  # per request

    def add(self, requests_per_s: float, p50_ms: float, cpu_ms: Mapping[str, float]) -> None:
        self.requests_per_s.append(requests_per_s)
        self.p50_ms.append(p50_ms)
        for kind in CPU_KINDS:
            self.cpu_ms.setdefault(kind, []).append(cpu_ms.get(kind, 0.0))

    def cpu(self, kind: str) -> float:
        return statistics.median(self.cpu_ms[kind])

    def router_and_proxy(self) -> float:
        return statistics.median(
            router + proxy
            for router, proxy in zip(self.cpu_ms["router"], self.cpu_ms["proxy"], strict=True)
        )

    def report(self) -> dict[str, Any]:
        return {
            "requests_per_s": round(statistics.median(self.requests_per_s), 1),
            "p50_ms": round(statistics.median(self.p50_ms), 2),
            "router_and_proxy_ms": round(self.router_and_proxy(), 2),
            "cpu_ms": {kind: round(self.cpu(kind), 2) for kind in CPU_KINDS if self.cpu(kind)},
        }


def measure(server: Server, n: int, in_flight: int) -> tuple[float, float, dict[str, float]]:
    """One round: requests/s, the median of their ms, and CPU ms of each by kind of process."""
    audio = sample_path("short").read_bytes()
    uploads = [Upload.of(audio, "short.flac", form_fields("whisper-1", "en", {}))] * n

    async def send() -> list[float]:
        async with Client(server.url) as client:
            outcomes = await send_all(client, uploads, in_flight)
        if failed := [one for one in outcomes if one.failure]:
            raise SystemExit(f"{server.url}: {failed[0].failure} {failed[0].error}")
        return [1000 * one.latency for one in outcomes]

    before, client_s, began_s = server.cpu_s(), time.process_time(), time.perf_counter()
    latencies_ms = asyncio.run(send())
    wall_s = time.perf_counter() - began_s
    after = server.cpu_s() | {"client": time.process_time() - client_s}
    return n / wall_s, statistics.median(latencies_ms), cpu_ms_each(before, after, n)


def idle_router_ms(server: Server) -> float:
    """CPU milliseconds per second of a router that nobody asks."""
    before_s = server.cpu_s()["router"]
    time.sleep(IDLE_S)
    return 1000 * (server.cpu_s()["router"] - before_s) / IDLE_S


def measure_cost(n_rounds: int, n_requests: int) -> list[dict[str, Any]]:
    """What a request costs, in every configuration, at every number in flight."""
    samples = {(name, n): Sample() for name in CONFIGURATIONS for n in IN_FLIGHT}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(start()) for name, start in CONFIGURATIONS.items()}
        for server in servers.values():  # warm-up
            measure(server, 100, max(IN_FLIGHT))
        idle_ms = idle_router_ms(servers["router"])
        for _ in range(n_rounds):
            for n in IN_FLIGHT:
                for name, server in servers.items():
                    samples[name, n].add(*measure(server, n_requests, n))
    rows = [
        {"configuration": name, "in_flight": n, **sample.report()}
        for (name, n), sample in samples.items()
    ]
    print_table(rows, "5 s clip, workers that answer at once; CPU ms per request")
    costs_ms = [samples["router", n].router_and_proxy() for n in IN_FLIGHT]
    print(
        f"router and proxy: {min(costs_ms):.1f} to {max(costs_ms):.1f} ms per request (to reach: "
        f"{TARGET_MS:.0f}), with {idle_ms:.0f} ms per second that an idle router takes, shared by "
        f"the requests of that second. {1000 / max(costs_ms):.0f} to {1000 / min(costs_ms):.0f} "
        f"requests/s would fill the one core that its event loop can use (to reach: "
        f"{TARGET_PER_S:.0f}): computed, as {os.cpu_count()} cores cannot show it"
    )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="per round")
    args = parser.parse_args()
    cost = measure_cost(args.rounds, args.requests)
    print_result("scaling", {"cores": os.cpu_count(), "cost": cost})


if __name__ == "__main__":
    main()

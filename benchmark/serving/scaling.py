"""What a request costs the router: CPU time of its processes, where the workers answer at once.

    python -m benchmark.serving.scaling [--rounds 5] [--requests 200]

The workers are `benchmark.serving.instant`'s, the upload is the 5 s clip. The ceiling is a bare
Serve ingress that reads the same upload. Both are up at the same time and take turns. Everything
shares this machine's cores, the client too, so requests/s would say little of one router.

Prints medians of CPU milliseconds per request by role, and one JSON line last.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from contextlib import ExitStack
from statistics import median

from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.openai_client import Client, Upload, form_fields, send_all
from benchmark.shared.server import BenchServer, serving
from cluster.demo.samples import sample_path

IN_FLIGHT = (1, 16, 64)
OWN = (sys.executable, "-m", "benchmark.serving.instant")
CONFIGURATIONS = {
    "ceiling: bare Serve ingress": ("--bare",),
    "router": (),
}


async def send(url: str, n: int, in_flight: int) -> None:
    audio = sample_path("short").read_bytes()
    uploads = [Upload.of(audio, "short.flac", form_fields("whisper-1", "en", {}))] * n
    async with Client(url) as client:
        outcomes = await send_all(client, uploads, in_flight)
    if failed := [one for one in outcomes if one.failure]:
        raise SystemExit(f"{url}: {failed[0].failure} {failed[0].error}")


def measure(server: BenchServer, n: int, in_flight: int) -> dict[str, float]:
    """One round: CPU milliseconds of each request by role, and of router and proxy together."""
    before_s = server.cpu_s()
    asyncio.run(send(server.url, n, in_flight))
    cpu_ms = {
        role: 1000 * (used_s - before_s.get(role, 0.0)) / n
        for role, used_s in server.cpu_s().items()
    }
    return cpu_ms | {"router and proxy": cpu_ms["router"] + cpu_ms.get("proxy", 0.0)}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200, help="per round")
    args = parser.parse_args()
    seen: dict[tuple[str, int], dict[str, list[float]]] = {}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(*flags, command=OWN))
            for name, flags in CONFIGURATIONS.items()
        }
        for server in servers.values():  # warm-up
            measure(server, 100, max(IN_FLIGHT))
        for _ in range(args.rounds):
            for in_flight in IN_FLIGHT:
                for name, server in servers.items():
                    kept = seen.setdefault((name, in_flight), defaultdict(list))
                    for role, cpu_ms in measure(server, args.requests, in_flight).items():
                        kept[role].append(cpu_ms)
    rows = [
        {
            "configuration": name,
            "in_flight": in_flight,
            "cpu_ms": {role: round(median(values), 2) for role, values in sorted(kept.items())},
        }
        for (name, in_flight), kept in seen.items()
    ]
    print_table(rows, "5 s clip, workers that answer at once; CPU ms per request")
    print_result("scaling", {"cores": os.cpu_count(), "rows": rows})


if __name__ == "__main__":
    main()

"""MLPerf's Whisper load, given by its own LoadGen to a server over HTTP. Not an MLPerf result.

    python -m benchmark.serving.mlperf                    # large-v3's shape: about 10 minutes
    python -m benchmark.serving.mlperf --shape base --dtype int8 --seconds 60

The load is that of MLPerf Inference since v5.1: windows of 24 s with 64 tokens each, Offline (all
windows at once) and Server (Poisson arrivals at a share of the offline rate). The weights are
random, in a published shape, with the number of tokens in them (`benchmark.shared.forced_length`),
so no word error rate is checked, which MLPerf demands. Beside the rate for each core stands that of
Intel's submission to v6.0: 29.0 windows/s on 256 cores with AMX, large-v3 in 8 bits by vLLM. The
ceiling is the encoder's and the decoder's products alone at the rate that this machine reaches.
Needs `mlcommons-loadgen` (in the `bench` extra). Prints a table, and one line of JSON last.
"""

from __future__ import annotations

import array
import asyncio
import re
import tempfile
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmark.cpu.systems import FIELDS, UNDOUBTED, by_dtype, our_server
from benchmark.serving.mixed import Speech
from benchmark.shared.clips import CACHE
from benchmark.shared.command import make_parser, print_result
from benchmark.shared.flops import SHAPES, window_flops
from benchmark.shared.forced_length import forced_checkpoint
from benchmark.shared.machine import cpu_info, product_flops, versions
from benchmark.shared.openai_client import Client, Upload
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.model.device import usable_cores

WINDOW_S, TOKENS = 24.0, 64
INTEL_PER_CORE = 29.0 / 256  # windows/s: 2 x Xeon 6980P, MLPerf Inference v6.0, Offline
SERVER_SHARE = 0.7  # of the offline rate, as arrivals
IN_FLIGHT = 64  # of the windows that Offline gives at once
LATENCY_S = 120.0  # which Server's 99th percentile must keep
SUMMARY = re.compile(r"^(?P<name>[^:\n=]+?)\s*: (?P<value>.+)$", re.MULTILINE)


class SystemUnderTest:
    """Sends what LoadGen asks for to a server. All audio is new, so nothing is answered twice."""

    def __init__(self, loadgen: Any, url: str, model: str) -> None:
        self._loadgen = loadgen
        self._speech, self._fields = Speech(), {"model": model, **FIELDS, **UNDOUBTED}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._slots = asyncio.Semaphore(IN_FLIGHT)
        self._client = Client(url, timeout_s=3600.0)
        self._wait(self._client.__aenter__())
        self.failures: list[str] = []

    def close(self) -> None:
        self._wait(self._client.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def rate(self, n: int) -> float:
        """Windows/s of `n` at once."""
        began = time.perf_counter()
        self._wait(self._all(n))
        return n / (time.perf_counter() - began)

    def run(self, scenario: str, n: int, rate: float, seconds: float) -> dict[str, str]:
        """LoadGen's own summary of a test of at least `n` windows."""
        settings = self._loadgen.TestSettings()
        settings.scenario = getattr(self._loadgen.TestScenario, scenario)
        settings.mode = self._loadgen.TestMode.PerformanceOnly
        settings.min_query_count = 1 if scenario == "Offline" else n
        settings.min_duration_ms = round(1000 * seconds)
        settings.offline_expected_qps = settings.server_target_qps = rate
        settings.server_target_latency_ns = round(1e9 * LATENCY_S)
        under_test = self._loadgen.ConstructSUT(self._issue, lambda: None)
        library = self._loadgen.ConstructQSL(n, n, lambda _: None, lambda _: None)
        with tempfile.TemporaryDirectory() as folder:
            logs = self._loadgen.LogSettings()
            logs.log_output.outdir = folder
            self._loadgen.StartTestWithLogSettings(under_test, library, settings, logs)
            told = Path(folder, "mlperf_log_summary.txt").read_text()
        self._loadgen.DestroyQSL(library)
        self._loadgen.DestroySUT(under_test)
        return {found["name"].strip(): found["value"] for found in SUMMARY.finditer(told)}

    def _issue(self, samples: list[Any]) -> None:
        for sample in samples:
            asyncio.run_coroutine_threadsafe(self._answer(sample.id), self._loop)

    async def _answer(self, sample_id: int) -> None:
        text = array.array("B", (await self._send()).encode() or b" ")
        address, size = text.buffer_info()
        response = self._loadgen.QuerySampleResponse(sample_id, address, size)
        self._loadgen.QuerySamplesComplete([response])

    async def _send(self) -> str:
        async with self._slots:
            body = wav_bytes(self._speech.take(WINDOW_S))
            outcome = await self._client.send(Upload.of(body, "window.wav", self._fields))
        if outcome.failure:
            self.failures.append(f"{outcome.failure}: {outcome.error}")
        return outcome.text

    async def _all(self, n: int) -> None:
        await asyncio.gather(*(self._send() for _ in range(n)))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="large-v3")
    add("--dtype", default="int8", help="float32, bfloat16 or int8")
    add("--seconds", type=float, default=60.0, help="of each scenario, at least")
    add("--cache", type=Path, default=CACHE, help="where the random checkpoint is kept")
    add("--out", type=Path)
    args = parser.parse_args()
    try:
        import mlperf_loadgen as loadgen
    except ImportError:
        raise SystemExit("pip install mlcommons-loadgen: the load is LoadGen's own") from None

    console, shape, cores = Console(width=100), SHAPES[args.shape], usable_cores()
    folder = forced_checkpoint(args.cache / f"mlperf-{args.shape}", shape, TOKENS)
    ceiling = product_flops(torch.float32, shape) / window_flops(shape, TOKENS)
    console.print(f"ceiling of float32 products alone: {ceiling:.3f} windows/s")
    scenarios: dict[str, dict[str, str]] = {}
    with our_server(by_dtype(args.shape, folder, [args.dtype])) as (system,):
        under_test = SystemUnderTest(loadgen, system.server.url, system.model)
        rate = max(under_test.rate(2), under_test.rate(8))  # the first ones warm up
        console.print(f"eight at once: {rate:.3f} windows/s")
        for scenario, share in (("Offline", 1.0), ("Server", SERVER_SHARE)):
            n = max(8, round(1.1 * rate * args.seconds))
            found = under_test.run(scenario, n, share * rate, args.seconds)
            scenarios[scenario] = found
            rate = float(found.get("Samples per second", rate))
        under_test.close()
    table = Table("scenario", "windows/s", "for each core", "p99 s", "LoadGen says")
    for scenario, found in scenarios.items():
        per_s = float(found.get("Samples per second") or found["Completed samples per second"])
        p99_s = float(found["99.00 percentile latency (ns)"]) / 1e9
        table.add_row(
            *(scenario, f"{per_s:.3f}", f"{per_s / cores:.4f}", f"{p99_s:.1f}", found["Result is"])
        )
    console.print(table)
    console.print(f"Intel's submission: {INTEL_PER_CORE:.3f} for each core, with AMX")
    if failures := under_test.failures:
        console.print(f"{len(failures)} requests failed, such as: {failures[0]}")
    machine = {**cpu_info(), **versions("torch"), "cores": cores}
    kept = {name: value for name, value in vars(args).items() if name in ("shape", "dtype")}
    figures = {"scenarios": scenarios, "ceiling": ceiling, "failed": len(failures)} | {
        "intel": INTEL_PER_CORE
    }
    print_result("mlperf", {**machine, **kept, **figures}, args.out)


if __name__ == "__main__":
    main()

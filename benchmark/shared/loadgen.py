"""Let MLPerf's LoadGen drive a server over HTTP, or engines in this process."""

from __future__ import annotations

import array
import asyncio
import re
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

WINDOW_S, TOKENS = 24.0, 64  # of MLPerf Inference's Whisper load since v5.1
SERVER_SHARE = 0.7  # of the offline rate, as arrivals
LATENCY_S = 120.0  # limit of Server's 99th percentile
LEAST_WINDOWS = 8
SUMMARY = re.compile(r"^(?P<name>[^:\n=]+?)\s*: (?P<value>.+)$", re.MULTILINE)


class SystemUnderTest:
    """Answers LoadGen on an event loop of its own thread.

    `send` transcribes a new window at each call. At most `in_flight` of them run at once.
    """

    def __init__(self, loadgen: Any, send: Callable[[], Awaitable[str]], in_flight: int) -> None:
        self._loadgen, self._send = loadgen, send
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._slots = asyncio.Semaphore(in_flight)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def wait(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def rate(self, n: int) -> float:
        began = time.perf_counter()
        self.wait(self._all(n))
        return n / (time.perf_counter() - began)

    def scenarios(self, rate: float, seconds: float) -> dict[str, dict[str, str]]:
        """Return LoadGen's own summaries of Offline, and of Server at a share of its rate."""
        found: dict[str, dict[str, str]] = {}
        for scenario, share in (("Offline", 1.0), ("Server", SERVER_SHARE)):
            n = max(LEAST_WINDOWS, round(1.1 * rate * seconds))
            found[scenario] = self._run(scenario, n, share * rate, seconds)
            print(f"{scenario}: {figures(found[scenario])}", flush=True)
            rate = float(found[scenario].get("Samples per second", rate))
        return found

    def _run(self, scenario: str, n: int, rate: float, seconds: float) -> dict[str, str]:
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
        async with self._slots:
            text = array.array("B", (await self._send()).encode() or b" ")
        address, size = text.buffer_info()
        response = self._loadgen.QuerySampleResponse(sample_id, address, size)
        self._loadgen.QuerySamplesComplete([response])

    async def _all(self, n: int) -> None:
        await asyncio.gather(*(self._send() for _ in range(n)))


def figures(found: dict[str, str]) -> tuple[float, float, str]:
    """Return windows/s, the 99th percentile in seconds, and LoadGen's verdict."""
    per_s = float(found.get("Samples per second") or found["Completed samples per second"])
    return per_s, float(found["99.00 percentile latency (ns)"]) / 1e9, found["Result is"]

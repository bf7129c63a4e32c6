"""Pools that grow under load, shrink without losing a request, sleep, and wake."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import WITH_DASHBOARD, Server, serving, wait_until
from tests.e2e.operation.test_metrics import EXPORT_S, scrape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = ("encoder", "decoder")
GROWING = """
encoder: {replicas: 1, max_replicas: 2, dtype: float32, cache: false}
decoder: {replicas: 1, max_replicas: 2, dtype: float32, kv_windows: 2}
scaling: {target_wait_s: 1, downscale_delay_s: 5}
"""
SLEEPING = """
encoder: {min_replicas: 0}
decoder: {min_replicas: 0}
scaling: {to_zero_delay_s: 3}
"""


@contextmanager
def scaled_server(folder: Path, settings: str) -> Iterator[Server]:
    file = folder / "settings.yaml"
    file.write_text(settings)
    with serving(folder, "--config", str(file), env=WITH_DASHBOARD) as running:
        yield running


def sizes(server: Server) -> tuple[int, ...]:
    pools = server.health()["pools"]
    return tuple(pools[role]["replicas"] for role in ROLES)


def transcribe(server: Server) -> str:
    client = server.client(max_retries=0, timeout=120)
    with sample_path("medium").open("rb") as file:
        return client.audio.transcriptions.create(model="whisper-1", file=file).text


def test_pools_grow_and_shrink_and_nothing_is_lost(tmp_path: Path) -> None:
    with scaled_server(tmp_path, GROWING) as server:
        expected = transcribe(server)
        assert sizes(server) == (1, 1)
        busy, stop = threading.Event(), threading.Event()
        busy.set()

        def load(is_steady: bool) -> list[str]:
            texts = []
            while not stop.is_set() and (is_steady or busy.is_set()):
                texts.append(transcribe(server))
                if not busy.is_set():
                    time.sleep(0.5)
            return texts

        with concurrent.futures.ThreadPoolExecutor(24) as threads:
            try:
                loads = [threads.submit(load, index < 1) for index in range(24)]
                wait_until(lambda: sizes(server) == (2, 2), 120, "two workers of each")
                wait_until(lambda: decisions(server), EXPORT_S, "decisions with their reasons")
                busy.clear()  # one client goes on while workers end
                wait_until(lambda: sizes(server) == (1, 1), 120, "one worker of each")
            finally:
                busy.clear()
                stop.set()
            texts = [text for each in loads for text in each.result(120)]
        assert len(texts) > 24
        assert set(texts) == {expected}
        wait_until(server.is_idle, 30, "every page back")


def decisions(server: Server) -> bool:
    labels = scrape(server)
    found: Any = labels.get("ray_splitscribe_autoscaling_decisions_total", set())
    return {"pool", "model", "direction", "reason"} <= found


def test_pools_sleep_and_the_next_request_wakes_them(tmp_path: Path) -> None:
    with scaled_server(tmp_path, SLEEPING) as server:
        expected = transcribe(server)
        for _ in range(2):
            wait_until(lambda: sizes(server) == (0, 0), 60, "no workers")
            answer = httpx.get(f"{server.url}/health", timeout=10)
            assert answer.status_code == 200  # or a load balancer would send nothing here
            assert answer.json()["pools"]["encoder"]["ready"]
            time.sleep(2)  # nobody is woken by questions
            assert sizes(server) == (0, 0)
            assert transcribe(server) == expected

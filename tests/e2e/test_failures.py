"""Workers that die under load: every request still answers, with the right text."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, start_server, stop_server, wait_until


@pytest.fixture(scope="module")
def doomed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A cluster of its own, since its workers get killed."""
    running = start_server(tmp_path_factory.mktemp("cwd"), "--encoders", "2", "--decoders", "2")
    yield running
    assert stop_server(running) == 0, running.output()[-4000:]


@pytest.mark.parametrize("role", ["encoder", "decoder"])
def test_a_killed_worker_costs_no_request(doomed: Server, role: str) -> None:
    """SIGKILL one replica while requests run: all texts equal those before; it comes back."""
    wait_until(lambda: len(doomed.workers(role)) == 2, 60, f"two {role}s")
    client = doomed.client()
    expected = client.audio.transcriptions.create(
        model="whisper-1", file=sample_path("medium")
    ).text
    stop_at = time.monotonic() + 8.0
    killed = threading.Event()
    after_kill: list[str] = []

    def load() -> list[str]:
        texts = []
        while time.monotonic() < stop_at or not killed.is_set():
            answer = client.audio.transcriptions.create(
                model="whisper-1", file=sample_path("medium")
            )
            texts.append(answer.text)
            if killed.is_set():
                after_kill.append(answer.text)
        return texts

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(4)]
        wait_until(
            lambda: any(w["running"] or w["queued"] for w in doomed.workers(role)), 30, "load"
        )
        victim = doomed.pid(role)
        os.kill(victim, signal.SIGKILL)
        killed.set()
        texts = [text for each in loads for text in each.result(120)]
    assert after_kill
    assert all(text == expected for text in texts)
    wait_until(
        lambda: len(doomed.workers(role)) == 2 and victim not in _pids(doomed, role),
        60,
        f"the {role}'s replacement",
    )


def _pids(server: Server, role: str) -> set[int]:
    return {int(worker["replica"].rsplit("-", 1)[1]) for worker in server.workers(role)}


def test_a_killed_router_frees_every_page(doomed: Server) -> None:
    """Requests whose router died hold nothing 15 s later, and a new router answers."""
    import psutil

    client = doomed.client(max_retries=0, timeout=60)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(
                client.audio.transcriptions.create, model="whisper-1", file=sample_path("long")
            )
            for _ in range(8)
        ]
        wait_until(lambda: any(w["running"] for w in doomed.workers("decoder")), 30, "load")
        routers = [
            p
            for p in psutil.process_iter(["cmdline"])
            if "ServeReplica:splitscribe:router" in " ".join(p.info["cmdline"] or [])
        ]
        assert routers
        for router in routers:
            router.kill()
        for call in calls:
            call.exception(90)

    def all_free() -> bool:
        workers = doomed.workers("encoder") + doomed.workers("decoder")
        return len(workers) == 4 and all(w["pages_free"] == w["pages_total"] for w in workers)

    wait_until(all_free, 30.0, "a new router, and every page free")
    answer = client.audio.transcriptions.create(model="whisper-1", file=sample_path("short"))
    assert answer.text

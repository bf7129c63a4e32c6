"""A real cluster, started as a person starts it: `splitscribe serve` in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from tests.support.waiting import wait_until

SPLITSCRIBE = str(Path(sys.executable).with_name("splitscribe"))
URL = r"http://[\w.:]+"  # in a line, which may be JSON
START_S = 120.0
STOP_S = 60.0
KERNELS_S = 600.0  # to compile all of them the first time, on full cores
WITH_DASHBOARD = {"SPLITSCRIBE_RAY_DASHBOARD": "serve"}


@dataclass
class Server:
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    url: str = ""

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", **options)

    def health(self) -> dict[str, Any]:
        return health_of(self.url)

    def workers(self, role: str) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.health()["pools"][role]["workers"]
        return workers

    def pid(self, role: str, index: int = 0) -> int:
        return int(self.workers(role)[index]["replica"].rsplit("-", 1)[1])

    def does_nothing(self) -> bool:
        health = self.health()
        return health["router"]["requests"] == 0 and all(
            worker["running"] == worker["queued"] == 0
            for pool in health["pools"].values()
            for worker in pool["workers"]
        )

    def is_idle(self) -> bool:
        return self.does_nothing() and all(
            worker["pages_free"] == worker["pages_total"]
            for role in ("encoder", "decoder")
            for worker in self.workers(role)
        )

    def dashboard(self) -> str:
        found = re.search(rf"dashboard +({URL})", self.output())
        assert found is not None
        return found[1]

    def output(self) -> str:
        return "".join(self.lines)


def health_of(url: str) -> dict[str, Any]:
    """What the pools say now: a busy one's last state may be older."""
    asked_s = time.monotonic()
    while True:
        # Without certificates, whose loading takes 50 ms of a core that the server could have.
        health = httpx.get(f"{url}/health", timeout=10, verify=False)
        answer: dict[str, Any] = health.json()
        age_s, waited_s = answer["age_s"], time.monotonic() - asked_s
        if waited_s > 10.0 or (age_s is not None and age_s < waited_s):
            return answer
        time.sleep(0.05)


def start_server(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    process = subprocess.Popen(
        [SPLITSCRIBE, "serve", "--port", "0", *flags],
        cwd=folder,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    server = Server(process)

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            server.lines.append(line)

    threading.Thread(target=read, daemon=True).start()

    def ready() -> str | None:
        if process.poll() is not None:
            raise SystemExit(f"serve ended with {process.returncode}:\n{server.output()}")
        found = re.search(rf"ready at ({URL})", server.output())
        return found.group(1) if found else None

    try:
        server.url = wait_until(ready, START_S, "the ready line")
    except BaseException:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)  # Ray's processes end with it
        print(server.output()[-4000:])
        raise
    return server


def stop_server(server: Server) -> int:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)
    try:
        return server.process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(server.process.pid, signal.SIGKILL)
        raise


@contextmanager
def serving(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """`start_server`, and at the end a stop that must go well."""
    running = start_server(folder, *flags, env=env)
    try:
        yield running
    finally:
        status = stop_server(running)
    assert status == 0, running.output()[-4000:]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that starts a cluster counts the start as its own time."""
    for item in items:
        if Path(__file__).parent in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def kernels() -> None:
    """All are compiled: else the first start of each model waits for them."""
    if not torch.cuda.is_available():
        subprocess.run([SPLITSCRIBE, "check", "--compile"], check=True, timeout=KERNELS_S)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and its own certificate for "localhost" in one file."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate, both = (folder / name for name in ("key.pem", "crt.pem", "tls.pem"))
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
        *("-keyout", key, "-out", certificate),
    ]
    subprocess.run(command, check=True, capture_output=True)
    both.write_text(certificate.read_text() + key.read_text())
    return both


@pytest.fixture(scope="session")
def server(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two encoders and two decoders, each decoder pulling from any encoder."""
    folder = tmp_path_factory.mktemp("cwd")
    # The page's tests call it by a name that is no secure context.
    env = {**WITH_DASHBOARD, "SPLITSCRIBE_ROUTER__HOSTS": "splitscribe.test"}
    with serving(folder, "--encoders", "2", "--decoders", "2", env=env) as running:
        yield running

"""The proxies' shipped configurations end TLS before a running server, and lose nothing."""

from __future__ import annotations

import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from cluster.common.kv.wire import LEASE_S
from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, wait_until
from tests.support.http_host import Answer, http_host
from tests.support.programs import needs
from tests.support.proxies import proxy_in_front

SHORT, LONG = sample_path("short"), sample_path("long")
DEAF_S = 10.0  # by when a server must have noticed that its client hung up

pytestmark = needs("openssl")


@dataclass(frozen=True)
class Proxy:
    url: str
    certificate: Path

    def client(self, **options: object) -> httpx.Client:
        context = ssl.create_default_context(cafile=str(self.certificate))
        return httpx.Client(base_url=self.url, verify=context, timeout=60, **options)  # type: ignore[arg-type]

    @contextmanager
    def streaming(self) -> Iterator[httpx.Response]:
        with (
            self.client() as client,
            LONG.open("rb") as file,
            client.stream(
                "POST",
                "/v1/audio/transcriptions",
                data={"model": "whisper-1", "stream": "true"},
                files={"file": ("long.flac", file)},
            ) as answer,
        ):
            yield answer


@pytest.fixture(scope="module", params=["haproxy", "nginx"])
def proxy(
    request: pytest.FixtureRequest,
    server: Server,
    certificate: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxy]:
    folder, backend = tmp_path_factory.mktemp(request.param), server.url.removeprefix("http://")
    with proxy_in_front(request.param, backend, folder, certificate) as port:
        yield Proxy(f"https://localhost:{port}", certificate)


def test_openais_client_gets_the_same_text_through_tls(server: Server, proxy: Proxy) -> None:
    with proxy.client() as http:
        client = openai.OpenAI(base_url=f"{proxy.url}/v1", api_key="none", http_client=http)
        create = client.audio.transcriptions.create
        said = create(model="whisper-1", file=SHORT).text
        stream = list(create(model="whisper-1", file=SHORT, stream=True))
    assert said == server.client().audio.transcriptions.create(model="whisper-1", file=SHORT).text
    assert stream[-1].type == "transcript.text.done"
    assert stream[-1].text == said


def test_events_come_one_by_one_and_not_at_the_end(proxy: Proxy) -> None:
    arrivals = []
    with proxy.streaming() as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data:"):
                arrivals.append(time.monotonic())
    assert len(arrivals) >= 3
    assert arrivals[-1] - arrivals[0] > 0.05, "all came at once"


def test_errors_keep_their_words_and_their_status(proxy: Proxy) -> None:
    with proxy.client() as client:
        answer = client.post(
            "/v1/audio/transcriptions",
            data={"model": "whisper-99"},
            files={"file": ("a.wav", b"RIFF")},
        )
        broken = client.post(
            "/v1/audio/transcriptions",
            data={"model": "whisper-1"},
            files={"file": ("a.wav", b"not audio at all" * 100_000)},
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (broken.status_code, broken.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.headers["x-request-id"].startswith("req_")


def test_who_hangs_up_leaves_nothing_behind(server: Server, proxy: Proxy) -> None:
    with proxy.streaming() as answer:
        next(answer.iter_lines())
    wait_until(server.does_nothing, DEAF_S, "the end of its request and sequences")
    # An encoder's answer that crossed with the hang-up has no reader, and its pages wait so long.
    wait_until(server.is_idle, 2 * LEASE_S, "every page is free")


@contextmanager
def silent_machine() -> Iterator[int]:
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # more than wait in its queue
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@contextmanager
def few_open_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nginx_asks_another_router_where_a_machine_has_vanished(
    certificate: Path, tmp_path: Path
) -> None:
    """`max_fails=0` has it ask the silent one for every second request."""
    with (
        http_host(lambda *_: Answer()) as answering,
        silent_machine() as silent,
        few_open_files(),
    ):
        backends = f"127.0.0.1:{silent} max_fails=0; server {answering.name}"
        with proxy_in_front("nginx", backends, tmp_path, certificate) as port:
            proxy = Proxy(f"https://localhost:{port}", certificate)
            with proxy.client() as client:
                said = [client.post("/", content=b"audio").status_code for _ in range(2)]
    assert said == [200, 200]
    log = (tmp_path / "error.log").read_text()
    assert "timed out" in log, "the silent one was not asked"
    assert "open file resource limit" not in log

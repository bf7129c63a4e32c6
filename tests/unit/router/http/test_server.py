"""The routes behind a real uvicorn, driven by OpenAI's SDK."""

from __future__ import annotations

import os
from collections.abc import Iterator

import openai
import pytest

from cluster.common.errors import OverloadedError
from router.api.params import Chunking
from router.http.routes import create_app
from tests.support.router_fakes import (
    LIMIT,
    FakeTranscriber,
    make_registry,
    make_settings,
    running_server,
)

AUDIO = os.urandom(100_000)


@pytest.fixture
def url(transcriber: FakeTranscriber) -> Iterator[str]:
    app = create_app(make_registry(transcriber), make_settings(api_key="key"))
    with running_server(app) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with make_client(url) as client:
        yield client


def make_client(url: str, api_key: str = "key", max_retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=max_retries)


def test_what_the_sdk_sends_as_objects_lists_and_extras_arrives(
    client: openai.OpenAI, transcriber: FakeTranscriber
) -> None:
    client.audio.transcriptions.create(
        model="demo",
        file=AUDIO,
        chunking_strategy={"type": "server_vad", "threshold": 0.25},
        keywords=["Zoë", "kiwi"],
        extra_body={"fallback": False, "beam_size": 4, "no_speech_threshold": "none"},
    )
    client.audio.transcriptions.create(
        model="demo",
        file=AUDIO,
        chunking_strategy="auto",
        extra_body={"decoding": "sequential", "clip_timestamps": [0, 1.5]},
    )
    first, second = transcriber.params
    assert first.chunking == Chunking(threshold=0.25)
    assert (first.hotwords, first.beam_size, first.temperatures) == ("Zoë, kiwi", 4, (0.0,))
    assert first.gates.no_speech_prob is None
    assert (second.chunking, second.decoding) == (None, "sequential")
    assert second.sequential.clip_timestamps == (0.0, 1.5)


def test_the_sdk_raises_typed_errors_with_message_code_and_request_id(
    client: openai.OpenAI, url: str
) -> None:
    create = client.audio.transcriptions.create
    with pytest.raises(openai.BadRequestError) as bad:
        create(model="demo", file=AUDIO, language="xx")
    assert (bad.value.param, bad.value.code) == ("language", "invalid_language_format")
    assert "ISO-639-1" in str(bad.value)
    assert bad.value.request_id is not None
    assert bad.value.request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError):
        create(model="whisper-9", file=AUDIO)
    with make_client(url, "no") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_the_sdk_retries_an_overload_and_nothing_deterministic(
    url: str, transcriber: FakeTranscriber
) -> None:
    with make_client(url, max_retries=1) as client:
        transcriber.error = OverloadedError("busy", retry_after_s=0.1)
        with pytest.raises(openai.InternalServerError):
            client.audio.transcriptions.create(model="demo", file=AUDIO)
        assert len(transcriber.uploads) == 2
        with pytest.raises(openai.APIStatusError):
            client.audio.transcriptions.create(model="demo", file=bytes(LIMIT + 1))
        assert len(transcriber.uploads) == 2


def test_a_key_refused_before_a_large_upload_is_read_arrives_as_such(url: str) -> None:
    with make_client(url, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.audio.transcriptions.create(model="demo", file=bytes(LIMIT + 8_000_000))

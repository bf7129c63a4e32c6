"""OpenAI's Python SDK, unchanged, against a running cluster: uploads, streams, failures."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import openai
import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import Server

SHORT = sample_path("short")


class Pipe(io.RawIOBase):
    """No length and no way back: the SDK can only send it in chunks."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._content.readinto(buffer)


UPLOADS: dict[str, Callable[[], Any]] = {
    "bytes": SHORT.read_bytes,
    "a wrong name and type": lambda: ("speech.mp3", SHORT.read_bytes(), "audio/mpeg"),
    "pipe": lambda: ("speech.flac", io.BufferedReader(Pipe(SHORT.read_bytes()))),
}


@pytest.fixture(scope="module")
def said(server: Server) -> str:
    text = server.client().audio.transcriptions.create(model="whisper-1", file=SHORT).text
    assert len(text.split()) > 8
    return text


@pytest.mark.parametrize("kind", UPLOADS)
def test_whatever_the_file_is_given_as_its_text_is_the_same(
    server: Server, said: str, kind: str
) -> None:
    client = server.client(max_retries=0)
    assert client.audio.transcriptions.create(model="whisper-1", file=UPLOADS[kind]()).text == said


def test_a_failure_in_mid_stream_is_an_error_and_no_short_text(server: Server, said: str) -> None:
    """The file turns to noise behind its first window, which nobody can know before."""
    damaged = bytearray(sample_path("long").read_bytes())
    at = int(0.7 * len(damaged))
    damaged[at : at + 20_000] = bytes(20_000)
    client = server.client(max_retries=0)
    stream = client.audio.transcriptions.create(
        model="whisper-1", file=("talk.flac", bytes(damaged)), stream=True
    )
    received: list[Any] = []
    with pytest.raises(openai.APIError) as failure:
        received.extend(stream)  # keeps what came before the error
    assert [event.type for event in received] == ["transcript.text.delta"] * len(received)
    assert received
    assert failure.value.code == "audio_truncated"
    assert client.audio.transcriptions.create(model="whisper-1", file=SHORT).text == said

"""An upload in chunks by OpenAI's Python SDK, against a running cluster."""

from __future__ import annotations

import io
from typing import Any

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


def test_a_file_in_chunks_under_a_wrong_name_and_type_has_the_same_text(server: Server) -> None:
    create = server.client(max_retries=0).audio.transcriptions.create
    said = create(model="whisper-1", file=SHORT).text
    assert len(said.split()) > 8
    pipe = ("speech.mp3", io.BufferedReader(Pipe(SHORT.read_bytes())), "audio/mpeg")
    assert create(model="whisper-1", file=pipe).text == said

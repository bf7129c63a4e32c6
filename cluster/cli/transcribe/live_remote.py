"""A live session of a running server, by OpenAI's client and its realtime API."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai

from cluster.cli.transcribe.job import LiveJob
from cluster.cli.transcribe.live_client import Said
from cluster.cli.transcribe.remote import ALIAS, base_url_of
from cluster.errors import InvalidRequestError
from cluster.messages import Pcm
from cluster.settings import BUNDLED_MODEL

RATE = 24_000  # Hz: what OpenAI's own server takes too
TRANSCRIBED = "conversation.item.input_audio_transcription"
ENDED = "the end of the sound"  # names the update that follows the last sound


@asynccontextmanager
async def through_server(job: LiveJob) -> AsyncIterator[RemoteLiveClient]:
    """Open a session.

    Raises:
        InvalidRequestError: no server answers there, it knows no live sessions, or it refuses.
    """
    base = base_url_of(job.target)
    client = openai.AsyncOpenAI(base_url=base, api_key=job.target.api_key or "none")
    query = {"intent": "transcription"}
    try:
        async with client, client.realtime.connect(extra_query=query, max_retries=0) as connection:
            yield await RemoteLiveClient.begin(connection, _session(job))
    except (OSError, openai.OpenAIError, _websocket_error()) as error:
        raise InvalidRequestError(f"the live session at {base} ended: {error}") from error


def _websocket_error() -> type[Exception]:
    from websockets.exceptions import WebSocketException

    return WebSocketException


def _session(job: LiveJob) -> dict[str, Any]:
    transcription: dict[str, Any] = {
        "model": ALIAS if job.model == BUNDLED_MODEL else job.model,
        "language": job.language,
        "prompt": job.prompt,
        "keywords": list(job.keywords),
    }
    return {
        "type": "transcription",
        "audio": {
            "input": {
                "format": {"type": "audio/pcm", "rate": RATE},
                "transcription": {name: value for name, value in transcription.items() if value},
                "turn_detection": {"type": "server_vad"},
            }
        },
    }


class RemoteLiveClient:
    """Implements `LiveClient`. The server bounds its audio, so `append` waits for the socket."""

    rate = RATE
    unsent_s = 0.0

    def __init__(self, connection: Any, session: dict[str, Any]) -> None:
        self._connection = connection
        self._session = session

    @classmethod
    async def begin(cls, connection: Any, session: dict[str, Any]) -> RemoteLiveClient:
        await connection.session.update(session=session)
        return cls(connection, session)

    async def append(self, pcm: Pcm) -> None:
        audio = base64.b64encode(pcm.astype("<i2").tobytes()).decode()
        await self._connection.input_audio_buffer.append(audio=audio)

    async def end(self) -> None:
        """Commit the last turn. The answer to the update after it shows that this was done."""
        await self._connection.input_audio_buffer.commit(event_id=ENDED)
        await self._connection.session.update(session=self._session, event_id=ENDED)

    async def said(self) -> AsyncIterator[Said]:
        """The server's texts, until every turn has ended and no audio is left."""
        open_turns: set[str] = set()
        n_updated = 0
        async for event in self._connection:
            kind = event.type
            if kind == "session.updated":
                n_updated += 1  # of the beginning, and of the end
            elif kind == "input_audio_buffer.committed":
                open_turns.add(event.item_id)
            elif kind == f"{TRANSCRIBED}.delta":
                yield Said(event.delta or "")
            elif kind == f"{TRANSCRIBED}.completed":
                open_turns.discard(event.item_id)
                yield Said(ends_turn=True)
            elif kind == f"{TRANSCRIBED}.failed":
                open_turns.discard(event.item_id)
                yield Said(ends_turn=True, error=event.error.message)
            elif kind == "error" and event.error.event_id != ENDED:
                raise InvalidRequestError(f"the server refused: {event.error.message}")
            if n_updated > 1 and not open_turns:
                return

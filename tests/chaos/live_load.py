"""Live sessions as a load: each speaks a clip in real time, through OpenAI's SDK.

Right: the words of a cluster without faults, each once, deltas that spell them, and no failed turn.
A session whose router has gone is lost, since the protocol has no resume.
"""

from __future__ import annotations

import asyncio
import base64
import time
from typing import Any

import openai
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import words_of
from tests.chaos.load import CLIPS, Load, Sent
from tests.support.audio.speech import pcm_of

CHUNK_S = 0.1
SILENCE_S = 1.5  # behind the speech, so that the turn ends by itself
TOLD_S = 90.0  # behind the last sound: a frozen worker is replaced within half of it
CLOSED = "the connection was closed"
TRANSCRIBED = "conversation.item.input_audio_transcription"
SESSION: dict[str, Any] = {
    "type": "transcription",
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": SAMPLE_RATE},
            "transcription": {"model": "whisper-1", "language": "en"},
            "turn_detection": {"type": "server_vad"},
        }
    },
}


class LiveLoad(Load):
    async def _one(self, client: openai.AsyncOpenAI, sent: Sent) -> None:
        verdict = sent.verdict
        try:
            told = await speak(client, sent.clip)
            is_right = words_of(told) == words_of(self._texts[sent.clip])
            verdict = "right" if is_right else "wrong"
            sent.detail = "" if is_right else f"{told!r} in place of {self._texts[sent.clip]!r}"
        except AssertionError as error:
            verdict, sent.detail = "wrong", str(error)
        except (InvalidHandshake, ConnectionRefusedError) as error:
            verdict, sent.detail = "refused", repr(error)
        except (ConnectionClosed, OSError) as error:
            verdict, sent.detail = "lost", f"{CLOSED}: {error!r}"
        except Exception as error:
            verdict, sent.detail = "lost", f"{type(error).__name__}: {error}"
        sent.ended_s = time.monotonic()
        sent.verdict = verdict


async def speak(client: openai.AsyncOpenAI, clip: str) -> str:
    """The text of all turns. AssertionError: a delta was taken back, or a turn failed."""
    query = {"intent": "transcription"}
    async with client.realtime.connect(extra_query=query, max_retries=0) as connection:
        await connection.session.update(session=SESSION)  # type: ignore[arg-type]
        hearing = asyncio.create_task(_hear(connection))
        try:
            await _send(connection, clip)
            async with asyncio.timeout(TOLD_S):
                return await hearing
        finally:
            hearing.cancel()


async def _send(connection: Any, clip: str) -> None:
    """In real time; the last commit finds no audio, and is answered behind all that was open."""
    pcm = pcm_of(clip)
    n = round(CHUNK_S * SAMPLE_RATE)
    chunks = [pcm[at : at + n].tobytes() for at in range(0, len(pcm), n)]
    chunks += [bytes(2 * n)] * round(SILENCE_S / CHUNK_S)
    due_s = time.monotonic()
    for chunk in chunks:
        await connection.input_audio_buffer.append(audio=base64.b64encode(chunk).decode())
        due_s += CHUNK_S
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    for _ in range(2):
        await connection.input_audio_buffer.commit()


async def _hear(connection: Any) -> str:
    deltas: dict[str, str] = {}
    final: dict[str, str] = {}
    open_items: set[str] = set()
    async for event in connection:
        kind, item = event.type, getattr(event, "item_id", None)
        assert kind not in ("error", f"{TRANSCRIBED}.failed"), f"told: {event}"
        if item and item not in final:
            open_items.add(item)
        if kind == f"{TRANSCRIBED}.delta":
            assert item not in final, f"a delta behind the end of its turn: {event}"
            deltas[item] = deltas.get(item, "") + (event.delta or "")
        elif kind == f"{TRANSCRIBED}.completed":
            final[item] = event.transcript
            open_items.discard(item)
            told = deltas.get(item, "")
            assert told == event.transcript, f"{told!r} was {event.transcript!r}"
            if event.usage.seconds == 0 and not open_items:
                return " ".join(text for text in final.values() if text)
    raise ConnectionResetError("the session was closed")


def live_texts(url: str) -> dict[str, str]:

    async def all_of() -> dict[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            return {clip: await speak(client, clip) for clip in dict.fromkeys(CLIPS)}

    return asyncio.run(all_of())

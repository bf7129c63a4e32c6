"""Live sessions as a load: each speaks a clip in real time.

A session is right if each word comes once, as without faults, and no turn fails. It is lost with
its router.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from benchmark.serving.live import COMMIT, TAIL_S, Heard, configure, send
from cluster.demo.samples import words_of
from tests.chaos.load import CLIPS, Load, Sent
from tests.support.audio.sounds import joined, silence
from tests.support.audio.speech import pcm_of

TOLD_S = 90.0  # behind the last sound: a frozen worker is replaced within half of it
CLOSED = "the connection was closed"


class LiveLoad(Load):
    async def _one(self, client: openai.AsyncOpenAI, sent: Sent) -> None:
        verdict = sent.verdict
        try:
            told = await speak(self._url, sent.clip)
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


async def speak(url: str, clip: str) -> str:
    """The text of all turns. AssertionError: a delta was taken back, or a turn failed."""
    heard = Heard()
    endpoint = url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    async with connect(endpoint) as socket:
        await configure(socket, {"model": "whisper-1", "language": "en"}, {"type": "server_vad"})
        hearing = asyncio.create_task(_hear(socket, heard))
        try:
            await send(socket, joined(pcm_of(clip), silence(TAIL_S)), time.perf_counter())
            heard.is_sent = True
            for _ in range(2):  # the last one finds no audio, and is answered behind all others
                await socket.send(COMMIT)
            async with asyncio.timeout(TOLD_S):
                await hearing
        finally:
            hearing.cancel()
    assert not heard.error, heard.error
    assert heard.is_append_only, heard
    return heard.text


async def _hear(socket: Any, heard: Heard) -> None:
    async for message in socket:
        if heard.take(json.loads(message), time.perf_counter()):
            return
    raise ConnectionResetError("the session was closed")


def live_texts(url: str) -> dict[str, str]:
    return {clip: asyncio.run(speak(url, clip)) for clip in dict.fromkeys(CLIPS)}

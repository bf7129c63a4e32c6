"""One realtime session of the benchmark: a talk goes in as it is spoken, and what came is noted.

A session is over when its last commit is answered. Two are sent, one behind the other: the first
ends what is still open, and the second finds no audio, so that it is answered by an item of 0 s,
behind all that were open. However long a server is silent before, it is waited for.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.client import connect

from benchmark.shared.talks import Talk
from cluster.common.messages import SAMPLE_RATE

PIECE_S = 0.1
TAIL_S = 1.5  # of silence behind a talk, so that its last turn ends by itself
ANSWER_S = 240.0  # for the last turns, once all audio was sent


@dataclass
class Heard:
    """What one session got. Times are seconds since its first sample was due."""

    deltas: list[tuple[float, str, str]] = field(default_factory=list)  # when, item, text
    stopped: dict[str, float] = field(default_factory=dict)  # item to where its silence had passed
    completed: dict[str, tuple[float, str]] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)
    open: set[str] = field(default_factory=set)  # items that were told of, and not ended
    is_sent: bool = False  # all audio, and the last commit
    late_s: float = 0.0  # most that a piece was sent too late
    error: str = ""

    def take(self, event: dict[str, Any], at_s: float) -> bool:
        """Note an event; whether it was the last one."""
        kind, item = event["type"], event.get("item_id", "")
        if item and item not in self.completed:
            self.open.add(item)
        if kind.endswith("transcription.delta"):
            self.deltas.append((at_s, item, event["delta"]))
        elif kind.endswith("speech_stopped"):
            self.stopped[item] = event["audio_end_ms"] / 1000
        elif kind.endswith("buffer.committed"):
            self.committed.append(item)
        elif kind.endswith("transcription.failed") or kind == "error":
            self.error = json.dumps(event)
            self.open.discard(item)
        elif kind.endswith("transcription.completed"):
            self.completed[item] = (at_s, event["transcript"])
            self.open.discard(item)
            return self.is_sent and event["usage"]["seconds"] == 0 and not self.open
        return False

    @property
    def text(self) -> str:
        """All turns, in the order of their audio."""
        return " ".join(
            self.completed[item][1] for item in self.committed if item in self.completed
        )

    @property
    def is_append_only(self) -> bool:
        """Whether every turn's deltas are its text."""
        joined: dict[str, str] = {}
        for _, item, text in self.deltas:
            joined[item] = joined.get(item, "") + text
        return all(joined.get(item, "") == text for item, (_, text) in self.completed.items())


async def speak(url: str, model: str, talk: Talk, start_s: float) -> Heard:
    """One session, from its first sample to its last turn."""
    heard = Heard()
    endpoint = url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
    try:
        async with connect(endpoint, max_size=None) as socket:
            await socket.send(json.dumps(_configuration(model)))
            listening = asyncio.create_task(_listen(socket, heard, start_s))
            await _send(socket, talk, heard, start_s)
            await asyncio.wait_for(listening, ANSWER_S)
    except Exception as error:
        heard.error = f"{type(error).__name__}: {error}"
    return heard


def _configuration(model: str) -> dict[str, Any]:
    transcription = {"model": model, "language": "en"}
    audio = {
        "format": {"type": "audio/pcm", "rate": SAMPLE_RATE},
        "transcription": transcription,
        "turn_detection": {"type": "server_vad"},
    }
    session = {"type": "transcription", "audio": {"input": audio}}
    return {"type": "session.update", "session": session}


async def _send(socket: Any, talk: Talk, heard: Heard, start_s: float) -> None:
    pcm = np.concatenate((talk.pcm, np.zeros(round(TAIL_S * SAMPLE_RATE), np.int16)))
    step = round(PIECE_S * SAMPLE_RATE)
    for first in range(0, len(pcm), step):
        due_s = start_s + (first + step) / SAMPLE_RATE
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        heard.late_s = max(heard.late_s, time.perf_counter() - due_s)
        audio = base64.b64encode(pcm[first : first + step].tobytes()).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
    heard.is_sent = True
    for _ in range(2):
        await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))


async def _listen(socket: Any, heard: Heard, start_s: float) -> None:
    """Until the last commit is answered."""
    async for message in socket:
        if heard.take(json.loads(message), time.perf_counter() - start_s):
            return

"""The live benchmark waits for every word, however long a server is silent before."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from benchmark.serving.live import Heard, speak
from benchmark.shared.talks import Talk
from cluster.common.messages import SAMPLE_RATE
from tests.support.live.realtime_door import opened


def completed(item: str, text: str, seconds: float) -> dict[str, object]:
    kind = "conversation.item.input_audio_transcription.completed"
    return {"type": kind, "item_id": item, "transcript": text, "usage": {"seconds": seconds}}


def told(kind: str, item: str) -> dict[str, object]:
    return {"type": f"input_audio_buffer.{kind}", "item_id": item}


def test_a_session_is_over_when_its_last_commit_is_answered() -> None:
    heard = Heard()
    assert not heard.take(told("committed", "a"), 1.0)
    assert not heard.take(completed("a", "one", 1.0), 2.0)
    assert not heard.take(told("speech_started", "b"), 9.0)
    heard.is_sent = True
    assert not heard.take(told("committed", "b"), 20.0)
    assert not heard.take(completed("b", "two", 1.0), 30.0)
    assert not heard.take(told("committed", "c"), 30.0)
    assert heard.take(completed("c", "", 0.0), 30.0)
    assert heard.text.split() == ["one", "two"]


async def test_a_talk_comes_back_as_the_words_of_its_turns() -> None:
    pcm = np.repeat(np.array([1, 2, 0], np.int16), SAMPLE_RATE)
    talk = Talk(pcm, (("w1", 1.0), ("w2", 2.0)), "none")
    async with opened() as door:
        url = f"http://127.0.0.1:{door.port}"
        heard = await asyncio.wait_for(
            speak(url, "whisper-1", talk, time.perf_counter() - 60.0), 30.0
        )
        await door.none_left()
    assert not heard.error
    assert heard.text.split() == ["w1", "w2"]
    assert heard.is_append_only

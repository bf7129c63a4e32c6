"""Voice activity of many sessions is that of each by itself."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cluster.planning.virtual_time import run_virtually
from router.audio.vad import FRAME_SAMPLES, SpeechDetector
from router.live.activity import MAX_FRAMES, VoiceActivity
from tests.support.audio.speech import pcm_of
from tests.support.live.played_speech import Floats, LoudIsSpeech
from tests.support.live.virtual_sessions import at_once


class Broken(LoudIsSpeech):
    def run(self, frames: Floats, h: Floats, c: Floats) -> tuple[Floats, Floats, Floats]:
        raise RuntimeError("broken")


def test_streams_have_the_probabilities_of_each_alone() -> None:
    """With pieces of any length, streams of several loudnesses, and silence between them."""
    speech = pcm_of("short")
    quiet = (speech // 20).astype(np.int16)
    later = np.concatenate((np.zeros(7_000, np.int16), speech))
    streams = [speech, quiet, later]
    sizes = (800, 1600, 333)
    pieces = [
        [stream[at : at + size] for at in range(0, len(stream), size)]
        for stream, size in zip(streams, sizes, strict=True)
    ]
    told: list[list[NDArray[np.float32]]] = [[] for _ in streams]

    async def run() -> None:
        activity = VoiceActivity(run=at_once)
        opened = [activity.open_stream(heard.append) for heard in told]
        for nth in range(max(map(len, pieces))):
            for stream, own in zip(opened, pieces, strict=True):
                if nth < len(own):
                    activity.feed(stream, own[nth])
            await asyncio.sleep(0.03)
        await asyncio.sleep(10.0)  # of the virtual clock: many ticks
        await activity.close()

    run_virtually(run())
    detector = SpeechDetector()
    for stream, heard in zip(streams, told, strict=True):
        probabilities = np.concatenate(heard)
        n_frames = len(stream) // FRAME_SAMPLES
        alone = detector.stream()
        expected = np.concatenate(
            [alone.feed(stream[at : at + 512]) for at in range(0, n_frames * 512, 512)]
        )
        assert probabilities.shape == expected.shape
        assert float(np.abs(probabilities - expected).max()) == 0.0


def test_a_tick_copies_only_what_it_takes() -> None:
    """Of minutes that wait: the loop of all sessions does it."""

    async def run() -> int:
        activity = VoiceActivity(LoudIsSpeech, run=at_once)
        stream = activity.open_stream(lambda probabilities: None)
        activity.feed(stream, np.ones(100 * MAX_FRAMES * FRAME_SAMPLES, np.int16))
        tracemalloc.start()
        for _ in range(3):
            assert stream.take().shape == (MAX_FRAMES, FRAME_SAMPLES)
        _, most_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        await activity.close()
        return most_bytes

    assert run_virtually(run()) < 10 * MAX_FRAMES * FRAME_SAMPLES * 2


def test_a_pushed_file_leaves_room_for_others() -> None:
    """A tick takes a bounded part of each stream."""
    told: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[NDArray[np.float32]], None]:
        return lambda found: told.append((name, len(found)))

    async def run() -> None:
        activity = VoiceActivity(LoudIsSpeech, run=at_once)
        pushed, spoken = activity.open_stream(note("pushed")), activity.open_stream(note("spoken"))
        activity.feed(pushed, np.ones(4 * MAX_FRAMES * FRAME_SAMPLES, np.int16))
        activity.feed(spoken, np.ones(FRAME_SAMPLES, np.int16))
        await asyncio.sleep(1.0)
        await activity.close()

    run_virtually(run())
    assert {"spoken", "pushed"} == {name for name, _ in told[:2]}
    assert [n for name, n in told if name == "pushed"] == [MAX_FRAMES] * 4


def test_a_broken_network_loses_no_speech() -> None:
    async def run() -> list[float]:
        found: list[float] = []
        activity = VoiceActivity(Broken, run=at_once)
        stream = activity.open_stream(lambda probabilities: found.extend(probabilities.tolist()))
        activity.feed(stream, np.full(3 * FRAME_SAMPLES, 1000, np.int16))
        await asyncio.sleep(1.0)
        await activity.close()
        return found

    assert run_virtually(run()) == [1.0, 1.0, 1.0]

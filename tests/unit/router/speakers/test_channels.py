"""Channels are transcribed by themselves and merged by time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.common.errors import InvalidAudioError, InvalidRequestError
from router.interface import RequestContext, Update
from router.pipeline import RequestRun
from router.speakers.channels import channels_of, transcribe_channels
from router.transcript import Transcript
from tests.support.router_fakes import make_segment

# By channel: the starts of its segments.
STARTS = {0: (0.0, 4.0, 5.0), 1: (1.0, 4.0), 2: (0.5,), 3: ()}


class Channels:
    """Transcribes each channel in its own time, and counts what is done at once."""

    def __init__(self, *order: int) -> None:
        self.ends = [asyncio.Event() for _ in STARTS]
        self.after = dict(zip(order[1:], order, strict=False))  # which channel each waits for
        self.now = self.most = 0
        self.contexts: dict[int, RequestContext] = {}

    async def transcribe(self, channel: int, run: RequestRun) -> Transcript:
        self.contexts[channel] = run.context
        self.now += 1
        self.most = max(self.most, self.now)
        starts = enumerate(STARTS[channel])
        found = [make_segment(i, f" {channel}.{start:g}", start) for i, start in starts]
        await asyncio.sleep(0)
        if (before := self.after.get(channel)) is not None:
            await self.ends[before].wait()
        for segment in found:
            run.context.update(Update(segment.text, (segment,)))
            run.context.finished_audio(1.0)
        self.ends[channel].set()
        self.now -= 1
        text = "".join(segment.text for segment in found)
        return Transcript("transcribe", "de" if channel == 1 else "en", 10.0, text, tuple(found))


def run_of(**changes: Any) -> RequestRun:
    return RequestRun(replace(RequestContext.unlimited("r", 60.0), **changes))


async def merged(
    sources: tuple[int | None, ...], stage: Channels, run: RequestRun, **limits: Any
) -> Transcript:
    channels = channels_of(sources, ("Agent",))
    limits = {"max_audio_s": 100.0, "at_once": 8, **limits}
    return await transcribe_channels(channels, 10.0, run, stage.transcribe, **limits)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_segments_come_out_in_one_order_whatever_ends_first(order: tuple[int, ...]) -> None:
    updates: list[Update] = []
    transcript = await merged((0, 1, 2), Channels(*order), run_of(on_update=updates.append))
    found = [segment.text.strip() for segment in transcript.segments]
    assert found == ["0.0", "2.0.5", "1.1", "0.4", "1.4", "0.5"]
    assert [segment.id for segment in transcript.segments] == list(range(6))
    told = [segment for update in updates for segment in update.segments]
    assert tuple(told) == transcript.segments
    assert "".join(update.text for update in updates) == transcript.text
    assert transcript.text.startswith("Agent: 0.0\nchannel 3: 2.0.5\nchannel 2: 1.1\nAgent: 0.4")
    for segment in transcript.segments:
        name = ("Agent", "channel 2", "channel 3")[int(segment.text.strip()[0])]
        assert segment.speaker == name
        assert all(word.speaker == name for word in segment.words)


async def test_equal_and_silent_channels_are_left_out_and_told() -> None:
    stage, progress = Channels(), []
    run = run_of(on_progress=lambda *seconds: progress.append(seconds))
    transcript = await merged((0, 0, 2, None), stage, run)
    assert sorted(stage.contexts) == [0, 2]
    told = [(one.speaker, one.same_as) for one in transcript.channels]
    assert told == [("Agent", None), (None, 1), ("channel 3", None), (None, None)]
    assert (transcript.duration_s, transcript.transcribed_s) == (10.0, 20.0)
    assert progress[-1] == (4.0, 20.0), "of both channels"
    silent = await merged((None, None), Channels(), run_of())
    assert (silent.text, silent.segments, silent.duration_s) == ("", (), 10.0)


async def test_channels_times_seconds_count() -> None:
    with pytest.raises(InvalidAudioError) as refused:
        await merged((0, 1, 2), Channels(), run_of(), max_audio_s=29.0)
    assert refused.value.code == "audio_too_long"
    await merged((0, 1, 1), Channels(), run_of(), max_audio_s=29.0)


async def test_only_so_many_channels_are_in_work() -> None:
    stage = Channels()
    await merged((0, 1, 2, 3), stage, run_of(), at_once=1)
    assert stage.most == 1


async def test_a_part_has_the_time_of_the_whole() -> None:
    stage, run = Channels(), run_of()
    run.context.started_s -= 50.0
    await merged((0, 1), stage, run)
    assert {context.started_s for context in stage.contexts.values()} == {run.context.started_s}
    assert run.context.remaining_s() == pytest.approx(10.0, abs=1.0)


async def test_channels_that_wait_side_by_side_wait_once() -> None:
    """Else a file of many channels looks like a queue of minutes, and others are refused."""
    stage, run = Channels(), run_of()

    async def transcribe(channel: int, part: RequestRun) -> Transcript:
        part.timings.waited(0, 10.0 + channel)
        part.timings.windows += 1
        return await stage.transcribe(channel, part)

    channels = channels_of((0, 1, 2), ())
    await transcribe_channels(channels, 10.0, run, transcribe, max_audio_s=60.0, at_once=3)
    timings = run.timings
    assert (timings.first_queue_s, timings.queue_s, timings.windows) == (12.0, 33.0, 3)


def test_more_names_than_channels_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        channels_of((0, 1), ("a", "b", "c"))
    assert refused.value.param == "channel_names"

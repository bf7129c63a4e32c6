"""Channels are transcribed by themselves and merged by time; voices get their turns at the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.common.errors import InvalidAudioError, InvalidRequestError
from router.interface import RequestContext, Update
from router.pipeline import RequestRun
from router.speakers.turns import SpeakerTurn
from router.speaking import channels_of, transcribe_channels, transcribe_voices
from router.transcript import Segment, Transcript
from tests.support.router_fakes import make_segment

# By channel: the starts of its segments.
STARTS = {0: (0.0, 4.0, 5.0), 1: (1.0, 4.0), 2: (0.5,), 3: ()}


def segments_of(channel: int) -> list[Segment]:
    return [
        make_segment(i, f" {channel}.{start:g}", start) for i, start in enumerate(STARTS[channel])
    ]


class Channels:
    """Transcribes each channel in its own time, and counts what is done at once."""

    def __init__(self, *order: int) -> None:
        self.ends = [asyncio.Event() for _ in STARTS]
        self.after = dict(zip(order[1:], order, strict=False))  # which channel each waits for
        self.now = self.most = 0
        self.contexts: dict[int | None, RequestContext] = {}

    async def transcribe(self, channel: int | None, run: RequestRun) -> Transcript:
        assert channel is not None
        self.contexts[channel] = run.context
        self.now += 1
        self.most = max(self.most, self.now)
        found = segments_of(channel)
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


def test_more_names_than_channels_are_refused() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        channels_of((0, 1), ("a", "b", "c"))
    assert refused.value.param == "channel_names"


async def test_segments_wait_for_the_turns_and_go_on_as_they_come() -> None:
    updates: list[Update] = []
    found, told, third = asyncio.Event(), asyncio.Event(), make_segment(2, " Good.", 4.0)
    heard = (make_segment(0, " How are you?"), make_segment(1, " Fine.", 2.0), third)

    async def transcribe(channel: int | None, run: RequestRun) -> Transcript:
        assert channel is None
        for segment in heard[:2]:
            run.context.update(Update(segment.text, (segment,)))
        assert not updates, "who speaks is not known yet"
        found.set()
        await told.wait()
        assert len(updates[0].segments) == 2
        run.context.update(Update(third.text, (third,)))
        assert len(updates) == 2
        return Transcript("transcribe", "en", 6.0, "How are you? Fine. Good.", heard)

    async def turns() -> list[SpeakerTurn]:
        await found.wait()
        return [SpeakerTurn(0.0, 1.8, "A"), SpeakerTurn(1.9, 4.0, "B"), SpeakerTurn(4.0, 6.0, "A")]

    def tell(update: Update) -> None:
        updates.append(update)
        told.set()

    run = run_of(on_update=tell)
    transcript = await transcribe_voices(run, transcribe, turns(), words=False)
    assert transcript.text == "A: How are you?\nB: Fine.\nA: Good."
    assert "".join(update.text for update in updates) == transcript.text
    assert [segment.id for segment in transcript.segments] == [0, 1, 2]
    assert sum((update.segments for update in updates), ()) == transcript.segments
    assert all(not segment.words for segment in transcript.segments)


async def test_words_keep_their_speakers_where_they_are_wanted() -> None:
    heard = (make_segment(0, " How are you?"), make_segment(1, " Fine.", 2.0))

    async def transcribe(_: int | None, run: RequestRun) -> Transcript:
        run.context.update(Update("How are you? Fine.", heard))
        return Transcript("transcribe", "en", 4.0, "How are you? Fine.", heard)

    async def turns() -> list[SpeakerTurn]:
        return [SpeakerTurn(0.0, 1.8, "A"), SpeakerTurn(1.9, 4.0, "B")]

    kept = await transcribe_voices(run_of(), transcribe, turns(), words=True)
    assert [word.speaker for word in kept.words] == ["A", "A", "A", "B"]


async def test_what_keeps_voices_from_being_found_ends_the_work() -> None:
    ended = asyncio.Event()

    async def transcribe(channel: int | None, run: RequestRun) -> Transcript:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    async def turns() -> list[SpeakerTurn]:
        raise InvalidRequestError("the reference is silent", param="known_speaker_references")

    with pytest.raises(ExceptionGroup):
        await transcribe_voices(run_of(), transcribe, turns(), words=False)
    assert ended.is_set()

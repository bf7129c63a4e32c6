"""One request whose speakers are told apart: by the file's channels, or by their voices.

By channel, each is transcribed as if it were a file of its own, with a context of its own, and the
segments are merged by time. By voice, the whole is transcribed while somebody finds the turns, and
words and turns are brought together at the end. Knows neither how audio becomes text nor how voices
become turns: it is given both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from cluster.common.errors import InvalidAudioError, InvalidRequestError
from router.interface import RequestContext, Update
from router.pipeline import RequestRun
from router.speakers.merged import ChannelMerge, SpokenText
from router.speakers.turns import Attribution, SpeakerTurn
from router.transcript import Channel, Segment, Transcript

TranscribeChannel = Callable[[int | None, RequestRun], Awaitable[Transcript]]  # None: their mix


def channels_of(sources: Sequence[int | None], names: Sequence[str]) -> tuple[Channel, ...]:
    """What becomes of a file's channels.

    Args:
        sources: as `router.audio.channels.ChannelSurvey.finish` returns.
        names: of the first channels' speakers; the others are called by their numbers.

    Raises:
        InvalidRequestError: there are more names than channels.
    """
    if len(names) > len(sources):
        raise InvalidRequestError(
            f"'channel_names' has {len(names)} names, and the file has {len(sources)} channels",
            param="channel_names",
        )
    found = []
    for i, source in enumerate(sources):
        name = names[i] if i < len(names) else f"channel {i + 1}"
        speaker = name if source == i else None
        same_as = None if source in (i, None) else source + 1
        found.append(Channel(i + 1, speaker, same_as))
    return tuple(found)


async def transcribe_channels(
    channels: Sequence[Channel],
    duration_s: float,
    run: RequestRun,
    transcribe: TranscribeChannel,
    *,
    max_audio_s: float,
    at_once: int,
) -> Transcript:
    """The transcript of all channels that have a speaker. at_once: channels in work.

    Raises:
        InvalidAudioError: together they are longer than `max_audio_s`.
        CrowdedError: they do not fit beside what is pending.
        SplitscribeError: what `transcribe` raises.
    """
    heard = [channel for channel in channels if channel.speaker is not None]
    total_s = duration_s * len(heard)
    if total_s > max_audio_s:
        raise InvalidAudioError(
            f"The file's {len(heard)} channels of {duration_s:.0f} s are longer together than this "
            f"server allows: {max_audio_s:g} s.",
            param="file",
            code="audio_too_long",
        )
    run.context.expect_audio(total_s)
    run.context.found_audio(total_s)
    slots = asyncio.Semaphore(at_once)
    merge = ChannelMerge([channel.speaker or "" for channel in heard])
    text = SpokenText()

    def take(place: int, segments: Sequence[Segment], *, ends: bool = False) -> None:
        if ready := tuple(merge.add(place, segments, ends=ends)):
            run.context.update(Update(text.add(ready), ready))

    async def one(place: int, channel: Channel) -> Transcript:
        context = _part_of(run.context)
        context.on_update = lambda update: take(place, update.segments)
        async with slots:
            part = RequestRun(context, run.timings)
            transcript = await transcribe(channel.channel - 1, part)
        take(place, (), ends=True)
        return transcript

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*each)) for each in enumerate(heard)]
    found = [task.result() for task in tasks]
    whole = max(found, key=_spoken_s, default=Transcript("transcribe", "en", 0.0, "", ()))
    return replace(
        whole,
        duration_s=max((one.duration_s for one in found), default=duration_s),
        text=text.whole,
        segments=tuple(merge.segments),
        channels=tuple(channels),
    )


async def transcribe_voices(
    run: RequestRun,
    transcribe: TranscribeChannel,
    turns: Awaitable[list[SpeakerTurn]],
    *,
    words: bool,
) -> Transcript:
    """The transcript with the speakers of `turns`. words: keep those.

    Segments are held until the turns are there, and go on as they come from then on.
    """
    context, text = run.context, SpokenText()
    waiting: list[Segment] = []
    done: list[Segment] = []
    listener, attribution = context.on_update, None

    def release(attribution: Attribution) -> None:
        segments = attribution.add(waiting)
        waiting.clear()
        if not words:
            segments = tuple(replace(segment, words=()) for segment in segments)
        done.extend(segments)
        told = Update(text.add(segments), segments)
        if listener is not None and segments:
            listener(told)

    def take(update: Update) -> None:
        waiting.extend(update.segments)
        if attribution is not None:
            release(attribution)

    async def label() -> None:
        nonlocal attribution
        attribution = Attribution(await turns)
        release(attribution)

    context.on_update = take
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(label())
            transcript = await transcribe(None, run)
    finally:
        context.on_update = listener
    return replace(transcript, text=text.whole, segments=tuple(done))


def _part_of(whole: RequestContext) -> RequestContext:
    """The context of a part of a request: its time and progress, and nobody who listens."""
    told_s = 0.0

    def finished(finished_s: float, _: float) -> None:
        nonlocal told_s
        whole.finished_audio(finished_s - told_s)
        told_s = finished_s

    part = replace(whole, share=None, on_update=None, on_progress=finished, finished_s=0.0)
    part.started_s = whole.started_s
    return part


def _spoken_s(transcript: Transcript) -> float:
    return sum(segment.end - segment.start for segment in transcript.segments)

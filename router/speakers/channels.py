"""Transcribes each channel of a file as one speaker, and merges the segments by time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

from cluster.common.errors import InvalidAudioError, InvalidRequestError
from router.interface import RequestContext, Update
from router.pipeline import RequestRun
from router.speakers.attribution import SpokenText
from router.transcript import Channel, Segment, Transcript

TranscribeChannel = Callable[[int, RequestRun], Awaitable[Transcript]]


def channels_of(sources: Sequence[int | None], names: Sequence[str]) -> tuple[Channel, ...]:
    """Name the first channels by `names`, and others by number. `sources`: see
    `ChannelSurvey.finish`. Raises InvalidRequestError for more names than channels.
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
    """The transcript of all channels with a speaker, of which `at_once` are in work. Raises
    InvalidAudioError if they are too long together, CrowdedError, and as `transcribe`.
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
            part = RequestRun(context)
            try:
                transcript = await transcribe(channel.channel - 1, part)
            finally:
                run.timings.add(part.timings)
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


def _part_of(whole: RequestContext) -> RequestContext:
    """A context that shares the request's time and progress, without a listener."""
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


class ChannelMerge:
    """Merges the segments of channels by start time. The earliest is final once every channel
    that has not ended has a next one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.segments: list[Segment] = []  # all returned so far
        self._names = names
        self._waiting: list[deque[Segment]] = [deque() for _ in names]
        self._open = set(range(len(names)))

    def add(self, place: int, segments: Iterable[Segment], *, ends: bool = False) -> list[Segment]:
        """Add the channel's next segments (`ends`: its last). Returns final ones with speakers."""
        self._waiting[place].extend(segments)
        if ends:
            self._open.discard(place)
        first = len(self.segments)
        while all(self._waiting[at] for at in self._open):
            heads = [(waiting[0].start, at) for at, waiting in enumerate(self._waiting) if waiting]
            if not heads:
                break
            _, at = min(heads)
            segment, name = self._waiting[at].popleft(), self._names[at]
            words = tuple(replace(word, speaker=name) for word in segment.words)
            named = replace(segment, id=len(self.segments), words=words, speaker=name)
            self.segments.append(named)
        return self.segments[first:]

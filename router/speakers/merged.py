"""Segments of several channels in one order, and the text that is a line for each turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from router.transcript import Segment


class ChannelMerge:
    """Merges the segments of channels by their start, whenever they come.

    What it returns is final: each channel's segments come in their own order, so one may go when
    every channel that has not ended has shown its next.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """names: of the channels' speakers."""
        self.segments: list[Segment] = []  # all that were returned
        self._names = names
        self._waiting: list[deque[Segment]] = [deque() for _ in names]
        self._ended = [False] * len(names)

    def add(self, place: int, segments: Iterable[Segment], *, ends: bool = False) -> list[Segment]:
        """Take the next segments of the channel at `place`. Returns what can go, with its speaker.

        ends: none follow.
        """
        self._waiting[place].extend(segments)
        self._ended[place] |= ends
        first = len(self.segments)
        while (at := self._next()) is not None:
            self.segments.append(self._named(self._waiting[at].popleft(), at))
        return self.segments[first:]

    def _next(self) -> int | None:
        """The channel whose segment comes next; None until that is certain."""
        if not all(
            waiting or ended for waiting, ended in zip(self._waiting, self._ended, strict=True)
        ):
            return None
        heads = [(waiting[0].start, at) for at, waiting in enumerate(self._waiting) if waiting]
        return min(heads)[1] if heads else None

    def _named(self, segment: Segment, place: int) -> Segment:
        name = self._names[place]
        words = tuple(replace(word, speaker=name) for word in segment.words)
        return replace(segment, id=len(self.segments), words=words, speaker=name)


class SpokenText:
    """The text of segments, in which each turn is a line that begins with the speaker's name."""

    def __init__(self) -> None:
        self.whole = ""
        self._speaker: str | None = None

    def add(self, segments: Iterable[Segment]) -> str:
        """Take the next segments. Returns what follows the text before."""
        first = len(self.whole)
        for segment in segments:
            if not (text := segment.text.strip()):
                continue
            if self.whole and segment.speaker == self._speaker:
                self.whole += segment.text.rstrip()
            else:
                line = "\n" if self.whole else ""
                name = "" if segment.speaker is None else f"{segment.speaker}: "
                self.whole += f"{line}{name}{text}"
            self._speaker = segment.speaker
        return self.whole[first:]

"""The text of segments, in which each turn is a line that begins with the speaker's name."""

from __future__ import annotations

from collections.abc import Iterable

from router.transcript import Segment


class SpokenText:
    """Grows with the segments; the names are in it."""

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

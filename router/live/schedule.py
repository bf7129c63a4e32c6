"""When a session's next update is due, and when one that runs is of no more use.

Everything is counted in audio and not in time: audio that comes faster than real time is decoded as
fast as the pools can. Knows what is heard and how busy the workers are, nothing of text.
"""

from __future__ import annotations

from router.live.interface import LiveConfig
from router.live.listener import TAIL, Listener
from router.live.pace import PATIENCE, Pace, Patience
from router.live.timeline import AudioBuffer, Stretch, samples

PAUSE = samples(0.25)  # of silence behind speech: what is decoded now may be the stretch's end
COVERED = samples(0.15)  # audio behind the last speech that shows that its last word is over
LONGEST = samples(20.0)  # audio of one update; encoders take 30 s
AHEAD = samples(0.25)  # audio that is decoded before its voice activity is known
ALLOWANCE = 2.0  # hops that an update may take before the next one overtakes it


class Schedule:
    """Of one session."""

    def __init__(self, pace: Pace, usual: Patience, audio: AudioBuffer, listener: Listener) -> None:
        """usual: of a turn whose client asked for no `delay`."""
        self._pace = pace
        self._usual = usual
        self._audio = audio
        self._listener = listener

    def newest(self, stretch: Stretch) -> int:
        """The end of the audio that is the stretch's so far.

        In a pause it is where the listener would end the stretch: what is decoded now may be its
        last word, and must not hold the beginning of another.
        """
        if stretch.end is not None:
            return min(stretch.end, self._audio.end)
        if self._is_paused(stretch):
            return min(self._audio.end, stretch.speech_end + TAIL)
        return min(self._audio.end, self._listener.heard_to + AHEAD)

    def is_due(self) -> bool:
        """Whether there is something to decode, or to tell, now."""
        if not self._listener.stretches:
            return False
        stretch = self._listener.stretches[0]
        if stretch.end is not None:
            return True
        if self._is_paused(stretch):
            return stretch.seen_to < stretch.speech_end + COVERED
        newest = self.newest(stretch)
        if newest - stretch.start >= LONGEST:
            return True
        heard_from = max(stretch.seen_to, stretch.speech[0][0])
        return newest - heard_from >= samples(self._hop_s(stretch))

    def is_overtaken(
        self, stretch: Stretch, end: int, waited_s: float, n_before: int, *, is_final: bool
    ) -> bool:
        """Whether what is decoded of a stretch, up to sample `end`, is of no more use.

        Args:
            n_before: updates that were overtaken in a row before this one; each gives the next one
                twice the time, so that one gets through at last.
            is_final: no more audio follows.
        """
        if stretch.turn.is_dropped:
            return True
        if is_final:
            return False
        if stretch.end is not None:
            is_whole = stretch.end - stretch.start <= LONGEST
            return is_whole and end < stretch.speech_end + COVERED
        hop_s = self._hop_s(stretch)
        newest = min(self.newest(stretch), stretch.start + LONGEST)
        return waited_s > ALLOWANCE * hop_s * 2**n_before and newest - end >= samples(hop_s)

    def patience(self, config: LiveConfig) -> Patience:
        return self._usual if config.delay is None else PATIENCE[config.delay]

    def _is_paused(self, stretch: Stretch) -> bool:
        return self._listener.heard_to - stretch.speech_end >= PAUSE

    def _hop_s(self, stretch: Stretch) -> float:
        return self._pace.hop_for(self.patience(stretch.turn.config))

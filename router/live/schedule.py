"""Decides when a session's next update is due, and when a running update is cancelled.

The hop between updates is measured in audio, so that audio that arrives faster than real time is
decoded as fast as the pools allow. It grows for all sessions while updates take long. New sessions
are refused when updates take too long at the largest hop.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.clock import Clock
from router.audio.windows import samples
from router.live.interface import Delay, LiveConfig
from router.live.turn_detector import TAIL, TurnDetector
from router.live.turns import AudioBuffer, Utterance

PAUSE = samples(0.25)  # silence after which the utterance may have ended
WORD_END_MARGIN = samples(0.15)  # audio after speech that shows the end of the last word
MAX_UTTERANCE = samples(20.0)  # audio of one update; encoders take 30 s
LOOK_AHEAD = samples(0.25)  # audio that is decoded before its voice activity is known
HOPS_ALLOWED = 2.0  # hops after which the next update may overtake a running one


class Schedule:
    def __init__(self, pace: Pace, audio: AudioBuffer, detector: TurnDetector) -> None:
        self._pace = pace
        self._audio = audio
        self._detector = detector

    def newest(self, utterance: Utterance) -> int:
        """Return where the utterance's audio ends so far. In a pause, this is where the turn
        detector ends it, so that the update does not cover the beginning of another word.
        """
        if utterance.end is not None:
            return min(utterance.end, self._audio.end)
        if self._is_paused(utterance):
            return min(self._audio.end, utterance.speech_end + TAIL)
        return min(self._audio.end, self._detector.detected_to + LOOK_AHEAD)

    def is_due(self) -> bool:
        if not self._detector.utterances:
            return False
        utterance = self._detector.utterances[0]
        if utterance.end is not None:
            return True
        if self._is_paused(utterance):
            return utterance.updated_to < utterance.speech_end + WORD_END_MARGIN
        newest = self.newest(utterance)
        if newest - utterance.start >= MAX_UTTERANCE:
            return True
        heard_from = max(utterance.updated_to, utterance.speech[0][0])
        return newest - heard_from >= samples(self._hop_s(utterance))

    def is_overtaken(
        self, utterance: Utterance, end: int, waited_s: float, n_before: int, *, is_final: bool
    ) -> bool:
        """Return whether to cancel an update of the audio up to sample `end`."""
        if utterance.turn.is_cleared:
            return True
        if is_final:
            return False
        if utterance.end is not None:
            is_whole = utterance.end - utterance.start <= MAX_UTTERANCE
            return is_whole and end < utterance.speech_end + WORD_END_MARGIN
        hop_s = self._hop_s(utterance)
        newest = min(self.newest(utterance), utterance.start + MAX_UTTERANCE)
        # Each of the `n_before` overtaken updates doubles the time, so that one of them ends.
        return waited_s > HOPS_ALLOWED * hop_s * 2**n_before and newest - end >= samples(hop_s)

    def _is_paused(self, utterance: Utterance) -> bool:
        return self._detector.detected_to - utterance.speech_end >= PAUSE

    def _hop_s(self, utterance: Utterance) -> float:
        return self._pace.hop_for(delay_profile(utterance.turn.config))


# Share of a hop that an update may take. At this limit a quarter of the sessions is being updated
# at any time, which keeps the workers busy without long waits.
MAX_UPDATE_SHARE = 0.25
NEW_WEIGHT = 0.1  # weight of a new measurement in the mean
FRESH_S = 10.0  # age up to which a measurement still describes the load


@dataclass(frozen=True, slots=True)
class DelayProfile:
    hold_s: float  # end of the audio in which no word is confirmed
    hop_s: float  # shortest hop


DELAY_PROFILES: dict[Delay, DelayProfile] = {
    "minimal": DelayProfile(0.3, 0.5),
    "low": DelayProfile(0.5, 0.5),
    "medium": DelayProfile(0.5, 1.0),
    "high": DelayProfile(0.8, 1.0),
    "xhigh": DelayProfile(0.8, 2.0),
}
DEFAULT_DELAY: Delay = "low"


def delay_profile(config: LiveConfig) -> DelayProfile:
    return DELAY_PROFILES[config.delay or DEFAULT_DELAY]


class Pace:
    """Chooses the hop, in seconds of audio, by the mean duration of the updates of all sessions."""

    def __init__(self, min_hop_s: float, max_hop_s: float, clock: Clock) -> None:
        self._min_s = min_hop_s
        self._max_s = max_hop_s
        self._clock = clock
        self._mean_s = 0.0
        self._measured_s = 0.0  # time of the last measurement

    @property
    def update_s(self) -> float:
        """Mean duration of recent updates, or 0 if there was none in the last 10 s."""
        is_fresh = self._clock.monotonic() - self._measured_s < FRESH_S
        return self._mean_s if is_fresh else 0.0

    @property
    def hop_s(self) -> float:
        return min(max(self.update_s / MAX_UPDATE_SHARE, self._min_s), self._max_s)

    def hop_for(self, profile: DelayProfile) -> float:
        return min(max(self.hop_s, profile.hop_s), max(self._max_s, profile.hop_s))

    @property
    def is_overloaded(self) -> bool:
        return self.update_s > self._max_s

    def record(self, seconds: float) -> None:
        mean_s = self.update_s or seconds
        self._mean_s = mean_s + NEW_WEIGHT * (seconds - mean_s)
        self._measured_s = self._clock.monotonic()

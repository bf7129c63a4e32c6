"""When a session's next update is due, and when a running one is no longer worth waiting for.

Everything is measured in audio and not in time, so that audio that arrives faster than real time is
decoded as fast as the pools can. It knows voice activity and the workers' load, and no text.
"""

from __future__ import annotations

from router.live.interface import LiveConfig
from router.live.pace import DELAY_PROFILES, DelayProfile, Pace
from router.live.timeline import AudioBuffer, Utterance, samples
from router.live.turn_detector import TAIL, TurnDetector

PAUSE = samples(0.25)  # of silence after speech: the utterance may have ended
WORD_END_MARGIN = samples(0.15)  # audio after speech, to show that its last word has ended
MAX_UTTERANCE = samples(20.0)  # audio of one update; encoders take 30 s
LOOK_AHEAD = samples(0.25)  # audio that is decoded although its voice activity is not known
HOPS_ALLOWED = 2.0  # duration in hops from which on the next update may overtake this one


class Schedule:
    """The update schedule of one session."""

    def __init__(
        self, pace: Pace, default_delay: DelayProfile, audio: AudioBuffer, detector: TurnDetector
    ) -> None:
        """default_delay: for a turn whose client asked for no `delay`."""
        self._pace = pace
        self._default_delay = default_delay
        self._audio = audio
        self._detector = detector

    def newest(self, utterance: Utterance) -> int:
        """The sample at which the utterance's audio ends so far.

        In a pause this is where the turn detector would end the utterance: the update may cover its
        last word, and must not cover the beginning of another.
        """
        if utterance.end is not None:
            return min(utterance.end, self._audio.end)
        if self._is_paused(utterance):
            return min(self._audio.end, utterance.speech_end + TAIL)
        return min(self._audio.end, self._detector.detected_to + LOOK_AHEAD)

    def is_due(self) -> bool:
        """Whether an utterance must be decoded or finished now."""
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
        """Whether a running update of the audio up to sample `end` should be cancelled.

        Args:
            waited_s: seconds since the update was started.
            n_before: number of updates in a row that were overtaken before this one. Each of them
                doubles the time that this one may take, so that one of them gets through.
            is_final: whether it is the utterance's final update, which is never overtaken.
        """
        if utterance.turn.is_cleared:
            return True
        if is_final:
            return False
        if utterance.end is not None:
            is_whole = utterance.end - utterance.start <= MAX_UTTERANCE
            return is_whole and end < utterance.speech_end + WORD_END_MARGIN
        hop_s = self._hop_s(utterance)
        newest = min(self.newest(utterance), utterance.start + MAX_UTTERANCE)
        return waited_s > HOPS_ALLOWED * hop_s * 2**n_before and newest - end >= samples(hop_s)

    def delay_profile(self, config: LiveConfig) -> DelayProfile:
        return self._default_delay if config.delay is None else DELAY_PROFILES[config.delay]

    def _is_paused(self, utterance: Utterance) -> bool:
        return self._detector.detected_to - utterance.speech_end >= PAUSE

    def _hop_s(self, utterance: Utterance) -> float:
        return self._pace.hop_for(self.delay_profile(utterance.turn.config))

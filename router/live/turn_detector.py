"""Finds the turns and utterances of a session by voice activity.

Turns begin and end by the client's rule (`server_vad`, `semantic_vad` or none). Pauses cut a turn
into utterances. A frame is speech if its probability reaches the threshold. Adjacent frames down to
0.15 below the threshold count too, but before the first speech frame only 0.3 s of them. Speech of
less than 96 ms is a click.
"""

from __future__ import annotations

from collections.abc import Iterable

from router.audio.vad import FRAME_SAMPLES
from router.audio.windows import samples
from router.live.interface import (
    LiveConfig,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
    TurnDetection,
)
from router.live.turns import SessionEvents, Turn, Utterance, milliseconds
from router.words import ends_sentence

CUT_PAUSE = samples(0.5)  # a pause within a turn that ends an utterance
# Silence after speech that belongs to the utterance. More could hold the beginning of a word of the
# next utterance, which is not detected yet.
TAIL = samples(0.3)
LEAD = samples(0.3)  # audio before the speech at which an utterance begins
# Seconds of silence that end a turn of `semantic_vad`: after a complete sentence, after other text.
SEMANTIC_S = {"high": (0.5, 2.0), "medium": (0.7, 4.0), "auto": (0.7, 4.0), "low": (1.0, 8.0)}
USUAL_THRESHOLD = 0.5  # probability from which a VAD frame counts as speech
RELEASE_BELOW = 0.15  # subtracted from the threshold for adjacent frames
LEAST_RUN = 3  # frames; shorter speech is a click
MOST_UNSURE = 10  # frames below the threshold that count before the first one that reaches it


class TurnDetector:
    def __init__(self, config: LiveConfig, events: SessionEvents) -> None:
        self.config = config
        # Not decoded to their end, in order; the transcriber removes them.
        self.utterances: list[Utterance] = []
        self.detected_to = 0
        self._events = events
        self._gate = SpeechGate()
        # Not ended, or their voice activity is not known up to their end.
        self.turns: list[Turn] = []
        self._n_turns = 0
        self._next_turn_from = 0  # earlier audio belongs to an earlier turn, or was cleared
        self._undecoded_from = 0  # the same, but before the silence that ended the last turn
        self._appended = 0

    # -- what the client sends ---------------------------------------------------------------

    def configure(self, config: LiveConfig) -> None:
        """Turn detection changes at once, all else for turns without text."""
        self.config = config
        for one in self.turns:
            if not one.text and one.end is None:
                one.config = config
        turn = self._open_turn
        if turn is None or turn.is_announced or config.turn_detection is None:
            return
        if all(utterance.turn is not turn for utterance in self.utterances):
            self.clear()  # a turn without speech: later speech begins another one
            self._next_turn_from = self._undecoded_from = turn.start

    def appended(self, n_samples: int) -> None:
        if self.config.turn_detection is None and self._open_turn is None and n_samples:
            self._begin_turn(self._padded(self.detected_to))
        self._appended += n_samples

    def commit(self) -> Turn | None:
        """End the turn at the end of the audio. Return None if there is nothing to commit."""
        turn = self._open_turn
        if turn is None:
            unsure_from = self.detected_to if self._gate.run is None else self._gate.run
            if self._appended - max(unsure_from, self._next_turn_from) < LEAST_RUN * FRAME_SAMPLES:
                return None  # too short for a word
            turn = self._begin_turn(self._padded(self.detected_to))
        elif self._appended <= turn.start:
            return None
        turn.end = self._next_turn_from = self._undecoded_from = self._appended
        self._events.emit(TurnCommitted(turn.number))
        turn.is_announced = True
        self._close_committed()
        return turn

    def clear(self) -> Turn | None:
        """Drop the audio of the open turn. Return the turn if it was announced."""
        turn = self._open_turn
        self._next_turn_from = self._undecoded_from = self._appended
        self._gate = SpeechGate()
        if turn is None:
            return None
        self.utterances = [utterance for utterance in self.utterances if utterance.turn is not turn]
        self.turns.remove(turn)
        turn.is_cleared = True
        turn.end = self._appended
        if not turn.is_announced:
            self._n_turns -= 1  # no event has named this number
            turn.span.end()
            return None
        return turn

    # -- voice activity ----------------------------------------------------------------------

    def add_probabilities(self, probabilities: Iterable[float]) -> None:
        for probability in probabilities:
            self._frame(float(probability))

    @property
    def has_undetected_audio(self) -> bool:
        return self._appended - max(self.detected_to, self._next_turn_from) >= FRAME_SAMPLES

    @property
    def needed_from(self) -> int:
        """The first sample that may still be decoded."""
        starts = [utterance.start for utterance in self.utterances]
        padding = max(LEAD, padding_of(self.config.turn_detection))
        waiting = self.detected_to - LEAD - padding - (MOST_UNSURE + 1) * FRAME_SAMPLES
        return max(0, min([waiting, *starts]))

    @property
    def _open_turn(self) -> Turn | None:
        return self.turns[-1] if self.turns and self.turns[-1].end is None else None

    def _frame(self, probability: float) -> None:
        start, end = self.detected_to, self.detected_to + FRAME_SAMPLES
        detection = self.config.turn_detection
        threshold = detection.threshold if isinstance(detection, ServerVad) else USUAL_THRESHOLD
        speech = self._gate.step(probability, start, threshold)
        self.detected_to = end
        if self.turns and (turn_end := self.turns[0].end) is not None:
            if speech is not None:
                self._add_speech(self.turns[0], speech[0], min(speech[1], turn_end))
            self._close_committed()
            return
        if speech is not None and speech[1] > self._next_turn_from:
            if (turn := self._open_turn) is None:
                turn = self._begin_turn(self._padded(max(speech[0], self._next_turn_from)))
                self._events.emit(SpeechStarted(turn.number, milliseconds(turn.start)))
                turn.is_announced = True
            self._add_speech(turn, *speech)
        elif (turn := self._open_turn) is not None:
            self._silence(turn, end)

    def _is_over(self, turn: Turn, silence: int) -> bool:
        detection = self.config.turn_detection
        if detection is None:
            return False
        if isinstance(detection, ServerVad):
            return silence >= samples(detection.silence_duration_ms / 1000)
        finished_s, unfinished_s = SEMANTIC_S[detection.eagerness]
        if silence < samples(finished_s):
            return False
        is_decoded = all(utterance.turn is not turn for utterance in self.utterances)
        return silence >= samples(unfinished_s) or (is_decoded and ends_sentence(turn.text))

    def _add_speech(self, turn: Turn, first: int, last: int) -> None:
        utterance = self._open_utterance(turn)
        if utterance is None:
            utterance = Utterance(turn, max(turn.cut_at, first - LEAD))
            self.utterances.append(utterance)
        utterance.add_speech(max(first, utterance.start), last)

    def _silence(self, turn: Turn, end: int) -> None:
        utterance = self._open_utterance(turn)
        last_speech_end = utterance.speech_end if utterance is not None else turn.last_speech_end
        silence = end - max(last_speech_end, turn.start)
        if self._is_over(turn, silence):
            self._end_turn(turn, end)
        elif utterance is not None and silence >= CUT_PAUSE:
            utterance.end = turn.cut_at = min(end, utterance.speech_end + TAIL)
            turn.last_speech_end = utterance.speech_end

    # -- turns and utterances -----------------------------------------------------------------

    def _begin_turn(self, start: int) -> Turn:
        turn = self._events.new_turn(self._n_turns, start, self.config)
        turn.cut_at = self._undecoded_from
        self._n_turns += 1
        self.turns.append(turn)
        return turn

    def _padded(self, first: int) -> int:
        return max(self._next_turn_from, first - padding_of(self.config.turn_detection), 0)

    def _end_turn(self, turn: Turn, end: int) -> None:
        turn.end = self._next_turn_from = end
        utterance = self._open_utterance(turn)
        last_speech_end = turn.last_speech_end if utterance is None else utterance.speech_end
        tail = min(TAIL, (end - last_speech_end) // 2)  # a word may begin in the second half
        self._undecoded_from = max(turn.cut_at, last_speech_end + tail)
        self._events.emit(SpeechStopped(turn.number, milliseconds(end)))
        self._events.emit(TurnCommitted(turn.number))
        self._finish_turn(turn, self._undecoded_from)

    def _close_committed(self) -> None:
        """Finish the turns whose voice activity is known up to their last whole frame."""
        while self.turns and (end := self.turns[0].end) is not None:
            if end - self.detected_to >= FRAME_SAMPLES:
                return
            self._finish_turn(self.turns[0], end)

    def _finish_turn(self, turn: Turn, decoded_to: int) -> None:
        """Mark the last utterance, or add an empty one if all are decoded."""
        self.turns.remove(turn)
        utterance = self._open_utterance(turn)
        if utterance is None:
            utterance = Utterance(turn, decoded_to)
            self.utterances.append(utterance)
        utterance.end = max(decoded_to, utterance.start)
        utterance.ends_turn = True

    def _open_utterance(self, turn: Turn) -> Utterance | None:
        last = self.utterances[-1] if self.utterances else None
        return last if last is not None and last.turn is turn and last.end is None else None


class SpeechGate:
    def __init__(self) -> None:
        self.run: int | None = None  # first sample of the frames that may be speech
        self._sure = False  # one of these frames reached the threshold

    def step(self, probability: float, start: int, threshold: float) -> tuple[int, int] | None:
        """Return (first, last) sample of the speech that ends with the frame at sample `start`."""
        if probability < threshold - RELEASE_BELOW:
            self.run, self._sure = None, False
            return None
        if self.run is None:
            self.run = start
        if not self._sure:
            self.run = max(self.run, start - MOST_UNSURE * FRAME_SAMPLES)
        self._sure = self._sure or probability >= threshold
        end = start + FRAME_SAMPLES
        if not self._sure or end - self.run < LEAST_RUN * FRAME_SAMPLES:
            return None
        return self.run, end


def padding_of(detection: TurnDetection) -> int:
    if isinstance(detection, ServerVad):
        return samples(detection.prefix_padding_ms / 1000)
    return LEAD

"""Where turns and stretches of a session begin and end, by its voice activity.

Gets a probability of speech for each frame of 32 ms, in order, and the client's commits. It makes
turns by the client's rule (`server_vad`, `semantic_vad` or none), and cuts a turn into stretches in
pauses, so that what is decoded stays short. It knows nothing of workers or text; whether a sentence
is finished it asks (`semantic_vad`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from router.audio.vad import FRAME_SAMPLES
from router.live.interface import (
    IdleTimeout,
    LiveConfig,
    LiveEvent,
    ServerVad,
    SpeechStarted,
    SpeechStopped,
    TurnCommitted,
)
from router.live.speech_gate import MOST_UNSURE, SpeechGate
from router.live.timeline import Stretch, Turn, milliseconds, samples
from router.live.turn_rules import LEAD, ends_turn, padding_of, threshold_of

CUT_PAUSE = samples(0.5)  # a pause that ends a stretch within a turn
# Silence behind the speech that a stretch ends with. A pause may be over before its detector hears
# that, so what follows may be the beginning of a word: that belongs to the next stretch as a whole.
TAIL = samples(0.3)
UNHEARD = samples(0.3)  # audio that no frame told of yet, and that may hold a word


class Listener:
    """One session's turns and stretches.

    Attributes:
        stretches: those that are not yet text, in order; whoever decodes them takes them out.
        heard_to: the sample up to which frames were told.
    """

    def __init__(
        self,
        config: LiveConfig,
        make_turn: Callable[[int, int, LiveConfig], Turn],
        tell: Callable[[LiveEvent], None],
        is_finished: Callable[[Turn], bool],
    ) -> None:
        """The session's parts.

        Args:
            make_turn: from number, start and configuration.
            is_finished: whether the text of a turn, as far as it is known, ends a sentence.
        """
        self.config = config
        self.stretches: list[Stretch] = []
        self.heard_to = 0
        self._make_turn = make_turn
        self._tell = tell
        self._is_finished = is_finished
        self._gate = SpeechGate()
        self._turns: list[Turn] = []  # whose audio is not complete, or not heard to its end
        self._n_turns = 0
        self._free_from = 0  # what lies before belongs to an earlier turn, or was cleared
        self._undecoded_from = 0  # the same, but for the silence that ended a turn
        self._appended = 0
        self._idle_from: int | None = 0  # None once the silence was reported

    # -- what the client does ----------------------------------------------------------------

    def configure(self, config: LiveConfig) -> None:
        """Take another configuration: turn detection at once, the rest for turns without text."""
        self.config = config
        for turn in self._turns:
            if not turn.text.told and turn.end is None:
                turn.configure(config)
        if self._open_turn is not None and config.turn_detection is not None:
            self._forget_untold()

    def appended(self, n_samples: int) -> None:
        """Note that so much audio came; frames of it follow by `heard`."""
        if self.config.turn_detection is None and self._open_turn is None and n_samples:
            self._begin_turn(max(self._appended, self._free_from))
        self._appended += n_samples

    def commit(self) -> Turn | None:
        """End the turn where the audio ends now; None where there is nothing to commit."""
        turn = self._open_turn
        if turn is None:
            if self._appended - max(self.heard_to, self._free_from) < UNHEARD:
                return None
            turn = self._begin_turn(self._padded(self.heard_to))
        elif self._appended <= turn.start:
            return None
        turn.end = self._free_from = self._undecoded_from = self._appended
        self._tell(TurnCommitted(turn.number))
        turn.is_told = True
        self._close_committed()
        return turn

    def clear(self) -> Turn | None:
        """Forget the audio of the turn that is open. Returns the turn if it was told of."""
        turn = self._open_turn
        self._free_from = self._undecoded_from = self._appended
        self._gate = SpeechGate()
        if turn is None:
            return None
        self._idle_from = self._appended
        self.stretches = [stretch for stretch in self.stretches if stretch.turn is not turn]
        self._turns.remove(turn)
        turn.is_dropped = True
        turn.end = self._appended
        if not turn.is_told:
            self._n_turns -= 1  # it was the last one, and nobody knows its number
            return None
        return turn

    # -- what is heard -----------------------------------------------------------------------

    def heard(self, probabilities: Iterable[float]) -> None:
        """Take the probabilities of the next frames."""
        for probability in probabilities:
            self._frame(float(probability))
        self._close_committed()

    @property
    def is_waiting(self) -> bool:
        """Audio is on its way through the network that may be part of a turn."""
        return self._appended - max(self.heard_to, self._free_from) >= FRAME_SAMPLES

    @property
    def pending(self) -> list[Turn]:
        """Turns whose audio is not complete, or not heard to its end."""
        return self._turns

    @property
    def needed_from(self) -> int:
        """The first sample that may still be decoded."""
        starts = [stretch.start for stretch in self.stretches]
        padding = max(LEAD, padding_of(self.config.turn_detection))
        waiting = self.heard_to - LEAD - padding - (MOST_UNSURE + 1) * FRAME_SAMPLES
        return max(0, min([waiting, *starts]))

    @property
    def _open_turn(self) -> Turn | None:
        """The turn that audio is added to."""
        return self._turns[-1] if self._turns and self._turns[-1].end is None else None

    def _frame(self, probability: float) -> None:
        start, end = self.heard_to, self.heard_to + FRAME_SAMPLES
        speech = self._gate.step(probability, start, threshold_of(self.config.turn_detection))
        self.heard_to = end
        if self._turns and (turn_end := self._turns[0].end) is not None:
            if speech is not None:
                self._add_speech(self._turns[0], speech[0], min(speech[1], turn_end))
            self._close_committed()
            return
        if speech is not None and speech[1] > self._free_from:
            turn = self._open_turn or self._begin_spoken_turn(max(speech[0], self._free_from))
            self._add_speech(turn, *speech)
        else:
            self._silence(end)

    def _add_speech(self, turn: Turn, first: int, last: int) -> None:
        stretch = self._growing(turn)
        if stretch is None:
            stretch = Stretch(turn, max(turn.cut_at, first - LEAD))
            self.stretches.append(stretch)
        stretch.hear(max(first, stretch.start), last)
        self._idle_from = None

    def _silence(self, end: int) -> None:
        """What a silent frame that ends at `end` may bring to an end."""
        turn = self._open_turn
        if turn is None:
            self._note_idle(end)
            return
        stretch = self._growing(turn)
        spoken_to = stretch.speech_end if stretch is not None else turn.spoken_to
        silence = end - max(spoken_to, turn.start)
        if ends_turn(self.config.turn_detection, silence, lambda: self._is_finished(turn)):
            self._end_turn(turn, end)
        elif stretch is not None and silence >= CUT_PAUSE:
            self._cut(stretch, end)

    def _note_idle(self, end: int) -> None:
        detection = self.config.turn_detection
        if not isinstance(detection, ServerVad) or detection.idle_timeout_ms is None:
            return
        if self._idle_from is None or end - self._idle_from < samples(
            detection.idle_timeout_ms / 1000
        ):
            return
        turn = self._begin_turn(self._idle_from)
        first, last = milliseconds(turn.start), milliseconds(end)
        self._tell(IdleTimeout(turn.number, first, last))
        self._tell(TurnCommitted(turn.number))
        turn.is_told, turn.end, self._free_from = True, end, end
        self._undecoded_from = end
        self._finish_turn(turn, end)
        self._idle_from = None  # told once for each silence

    # -- turns and stretches -----------------------------------------------------------------

    def _begin_turn(self, start: int) -> Turn:
        turn = self._make_turn(self._n_turns, start, self.config)
        self._n_turns += 1
        self._turns.append(turn)
        return turn

    def _begin_spoken_turn(self, first: int) -> Turn:
        turn = self._begin_turn(self._padded(first))
        turn.cut_at = self._undecoded_from
        self._tell(SpeechStarted(turn.number, milliseconds(turn.start)))
        turn.is_told = True
        return turn

    def _padded(self, first: int) -> int:
        """Where a turn begins whose speech begins at `first`."""
        return max(self._free_from, first - padding_of(self.config.turn_detection), 0)

    def _end_turn(self, turn: Turn, end: int) -> None:
        """End a turn by its silence."""
        turn.end = self._free_from = end
        stretch = self._growing(turn)
        spoken_to = turn.spoken_to if stretch is None else stretch.speech_end
        self._undecoded_from = max(turn.cut_at, min(end, spoken_to + TAIL))
        self._tell(SpeechStopped(turn.number, milliseconds(end)))
        self._tell(TurnCommitted(turn.number))
        self._finish_turn(turn, self._undecoded_from)

    def _close_committed(self) -> None:
        """Finish the turns whose ends were heard, but for the part of a frame."""
        while self._turns and (end := self._turns[0].end) is not None:
            if end - self.heard_to >= FRAME_SAMPLES:
                return
            self._finish_turn(self._turns[0], end)

    def _finish_turn(self, turn: Turn, decoded_to: int) -> None:
        """Mark the last stretch of a turn; an empty one where none is left to be decoded."""
        self._turns.remove(turn)
        stretch = self._growing(turn)
        if stretch is None:
            stretch = Stretch(turn, decoded_to)
            self.stretches.append(stretch)
        stretch.end = max(decoded_to, stretch.start)
        stretch.ends_turn = True
        self._idle_from = turn.end

    def _growing(self, turn: Turn) -> Stretch | None:
        last = self.stretches[-1] if self.stretches else None
        return last if last is not None and last.turn is turn and last.end is None else None

    def _cut(self, stretch: Stretch, end: int) -> None:
        """End a stretch within its turn."""
        stretch.end = stretch.turn.cut_at = min(end, stretch.speech_end + TAIL)
        stretch.turn.spoken_to = stretch.speech_end

    def _forget_untold(self) -> None:
        """Let go of a turn in which nothing was heard yet: what is heard later begins another."""
        turn = self._open_turn
        if turn is None or turn.is_told or any(one.turn is turn for one in self.stretches):
            return
        self.clear()
        self._free_from = self._undecoded_from = self.heard_to

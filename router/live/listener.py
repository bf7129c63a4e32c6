"""Where turns and stretches of a session begin and end, by its voice activity.

Gets a probability of speech for each frame of 32 ms, in order, and the client's commits. It makes
turns by the client's rule (`server_vad`, `semantic_vad` or none), and cuts a turn into stretches in
pauses, so that what is decoded stays short. It knows nothing of workers or text; whether a sentence
is finished it asks (`semantic_vad`).

A frame counts as speech from the threshold on, and beside such a frame already 0.15 below it; a run
shorter than 96 ms is a click.
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
from router.live.timeline import Stretch, Turn, milliseconds, samples

RELEASE_BELOW = 0.15  # of the threshold
LEAST_RUN = 3  # frames of speech that are no click
LEAD = samples(0.3)  # audio before the speech that a stretch begins with
CUT_PAUSE = samples(0.5)  # a pause that ends a stretch within a turn
UNHEARD = samples(0.3)  # audio that no frame told of yet, and that may hold a word

# Silence that ends a turn of `semantic_vad`: behind a finished sentence, and behind another text.
SEMANTIC_S = {"high": (0.5, 2.0), "medium": (0.7, 4.0), "auto": (0.7, 4.0), "low": (1.0, 8.0)}


class SpeechGate:
    """Tells runs of speech from clicks, frame by frame."""

    def __init__(self) -> None:
        self._run: int | None = None  # where the run of frames began that may be speech
        self._sure = False  # one of them reached the threshold

    def step(self, probability: float, start: int, threshold: float) -> tuple[int, int] | None:
        """Take the frame that begins at sample `start`.

        Returns:
            The run of speech that the frame belongs to, as (first, last) so far. None where the
            frame is silent, or not yet known to be speech.
        """
        if probability < threshold - RELEASE_BELOW:
            self._run, self._sure = None, False
            return None
        if self._run is None:
            self._run = start
        self._sure = self._sure or probability >= threshold
        end = start + FRAME_SAMPLES
        if not self._sure or end - self._run < LEAST_RUN * FRAME_SAMPLES:
            return None
        return self._run, end


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
            turn = self._begin_turn(self._free_from_padding(self.heard_to))
        elif self._appended <= turn.start:
            return None
        turn.end = self._free_from = self._appended
        self._tell(TurnCommitted(turn.number))
        turn.is_told = True
        self._close_committed()
        return turn

    def clear(self) -> Turn | None:
        """Forget the audio of the turn that is open. Returns the turn if it was told of."""
        turn, self._free_from = self._open_turn, self._appended
        self._gate = SpeechGate()
        if turn is None:
            return None
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
        waiting = self.heard_to - LEAD - self._padding - LEAST_RUN * FRAME_SAMPLES
        return max(0, min([waiting, *starts]))

    @property
    def _open_turn(self) -> Turn | None:
        """The turn that audio is added to."""
        return self._turns[-1] if self._turns and self._turns[-1].end is None else None

    @property
    def _padding(self) -> int:
        detection = self.config.turn_detection
        if isinstance(detection, ServerVad):
            return max(LEAD, samples(detection.prefix_padding_ms / 1000))
        return LEAD

    @property
    def _threshold(self) -> float:
        detection = self.config.turn_detection
        return detection.threshold if isinstance(detection, ServerVad) else 0.5

    def _frame(self, probability: float) -> None:
        start, end = self.heard_to, self.heard_to + FRAME_SAMPLES
        speech = self._gate.step(probability, start, self._threshold)
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
        first = max(first, turn.start)
        if stretch is None:
            begin = max(turn.start, turn.cut_at, first - LEAD)
            stretch = Stretch(turn, begin)
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
        if self._is_turn_over(turn, silence):
            self._end_turn(turn, end)
        elif stretch is not None and silence >= CUT_PAUSE:
            self._cut(stretch, end)

    def _is_turn_over(self, turn: Turn, silence: int) -> bool:
        detection = self.config.turn_detection
        if detection is None:
            return False
        if isinstance(detection, ServerVad):
            return silence >= samples(detection.silence_duration_ms / 1000)
        finished_s, unfinished_s = SEMANTIC_S[detection.eagerness]
        if silence < samples(finished_s):
            return False
        return silence >= samples(unfinished_s) or self._is_finished(turn)

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
        self._finish_turn(turn)
        self._idle_from = None  # told once for each silence

    # -- turns and stretches -----------------------------------------------------------------

    def _begin_turn(self, start: int) -> Turn:
        turn = self._make_turn(self._n_turns, start, self.config)
        self._n_turns += 1
        self._turns.append(turn)
        return turn

    def _begin_spoken_turn(self, first: int) -> Turn:
        turn = self._begin_turn(self._free_from_padding(first))
        self._tell(SpeechStarted(turn.number, milliseconds(turn.start)))
        turn.is_told = True
        return turn

    def _free_from_padding(self, first: int) -> int:
        detection = self.config.turn_detection
        given = (
            samples(detection.prefix_padding_ms / 1000)
            if isinstance(detection, ServerVad)
            else LEAD
        )
        return max(self._free_from, first - given, 0)

    def _end_turn(self, turn: Turn, end: int) -> None:
        """End a turn by its silence."""
        turn.end = self._free_from = end
        self._tell(SpeechStopped(turn.number, milliseconds(end)))
        self._tell(TurnCommitted(turn.number))
        self._finish_turn(turn)

    def _close_committed(self) -> None:
        """Finish the turns whose ends were heard, but for the part of a frame."""
        while self._turns and (end := self._turns[0].end) is not None:
            if end - self.heard_to >= FRAME_SAMPLES:
                return
            self._finish_turn(self._turns[0])

    def _finish_turn(self, turn: Turn) -> None:
        """Mark the last stretch of a turn; an empty one where none is left to be decoded."""
        assert turn.end is not None
        self._turns.remove(turn)
        stretch = self._growing(turn)
        if stretch is None:
            stretch = Stretch(turn, turn.end)
            self.stretches.append(stretch)
        stretch.end = max(turn.end, stretch.start)
        stretch.ends_turn = True
        self._idle_from = turn.end

    def _growing(self, turn: Turn) -> Stretch | None:
        last = self.stretches[-1] if self.stretches else None
        return last if last is not None and last.turn is turn and last.end is None else None

    def _cut(self, stretch: Stretch, end: int) -> None:
        """End a stretch within its turn."""
        stretch.end = end
        stretch.turn.spoken_to = stretch.speech_end
        stretch.turn.cut_at = end

    def _forget_untold(self) -> None:
        """Let go of a turn that began by itself, and of which nothing is known."""
        turn = self._open_turn
        if turn is not None and not turn.is_told and self._growing(turn) is None:
            self.clear()

"""Which audio of a session is speech, from the probabilities of its VAD frames.

A frame counts as speech when its probability reaches the threshold. Frames beside it count too,
down to 0.15 below the threshold, and at most 0.3 s before it. Less than 96 ms is a click.
"""

from __future__ import annotations

from router.audio.vad import FRAME_SAMPLES

RELEASE_BELOW = 0.15  # of the threshold
LEAST_RUN = 3  # frames; less is a click
MOST_UNSURE = 10  # frames below the threshold that may count before one that reaches it


class SpeechGate:
    """Finds intervals of speech, frame by frame."""

    def __init__(self) -> None:
        self._run: int | None = None  # where the frames began that may be speech
        self._sure = False  # whether one of them reached the threshold

    def step(self, probability: float, start: int, threshold: float) -> tuple[int, int] | None:
        """Take the probability of the frame that begins at sample `start`.

        Returns:
            The interval of speech that ends with this frame, as (first, last) sample. None if the
            frame is silent, or is not known to be speech yet.
        """
        if probability < threshold - RELEASE_BELOW:
            self._run, self._sure = None, False
            return None
        if self._run is None:
            self._run = start
        if not self._sure:
            self._run = max(self._run, start - MOST_UNSURE * FRAME_SAMPLES)
        self._sure = self._sure or probability >= threshold
        end = start + FRAME_SAMPLES
        if not self._sure or end - self._run < LEAST_RUN * FRAME_SAMPLES:
            return None
        return self._run, end

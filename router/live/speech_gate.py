"""What is speech in one session, from the probabilities of its frames of 32 ms.

A frame counts as speech from the threshold on, and beside such a frame already 0.15 below it, for
0.3 s in front of it at most; a run shorter than 96 ms is a click.
"""

from __future__ import annotations

from router.audio.vad import FRAME_SAMPLES

RELEASE_BELOW = 0.15  # of the threshold
LEAST_RUN = 3  # frames of speech that are no click
MOST_UNSURE = 10  # frames in front of one at the threshold that count as speech with it


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
        if not self._sure:
            self._run = max(self._run, start - MOST_UNSURE * FRAME_SAMPLES)
        self._sure = self._sure or probability >= threshold
        end = start + FRAME_SAMPLES
        if not self._sure or end - self._run < LEAST_RUN * FRAME_SAMPLES:
            return None
        return self._run, end

"""A client's choice of turn detection as thresholds and numbers of samples."""

from __future__ import annotations

from collections.abc import Callable

from router.live.interface import ServerVad, TurnDetection
from router.live.timeline import samples

LEAD = samples(0.3)  # audio before the speech with which an utterance begins

# Seconds of silence that end a turn of `semantic_vad`: after a finished sentence, after any text.
SEMANTIC_S = {"high": (0.5, 2.0), "medium": (0.7, 4.0), "auto": (0.7, 4.0), "low": (1.0, 8.0)}


def threshold_of(detection: TurnDetection) -> float:
    """The probability from which a VAD frame counts as speech."""
    return detection.threshold if isinstance(detection, ServerVad) else 0.5


def padding_of(detection: TurnDetection) -> int:
    """Samples before the speech that belong to the turn."""
    if isinstance(detection, ServerVad):
        return samples(detection.prefix_padding_ms / 1000)
    return LEAD


def ends_turn(detection: TurnDetection, silence: int, is_finished: Callable[[], bool]) -> bool:
    """Whether `silence` samples end a turn. is_finished: whether its text ends with a sentence."""
    if detection is None:
        return False
    if isinstance(detection, ServerVad):
        return silence >= samples(detection.silence_duration_ms / 1000)
    finished_s, unfinished_s = SEMANTIC_S[detection.eagerness]
    if silence < samples(finished_s):
        return False
    return silence >= samples(unfinished_s) or is_finished()

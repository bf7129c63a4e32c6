"""Which text stays in parallel mode where the voice detector heard little or no speech.

openai/whisper asks the decoder alone whether a window holds speech, and takes or leaves it whole.
Here a voice detector has been over the audio: text that the decoder doubts needs its support, per
window and per segment, so that music between two sentences gets no words. Clear speech is never
left out, nor is text that the decoder is sure of. Knows windows and scores, nothing of workers.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from cluster.common.messages import SAMPLE_RATE, QualityGates
from router.audio.windows import Window
from router.transcript import Segment, WindowTranscript

FAINT_DOUBT = 0.5  # share of the doubt that is allowed in a window with sure speech
MIN_UNHEARD_S = 1.0  # a decoder's timestamps are less exact than the detector
LEAD_S = 0.3  # kept before speech that is decoded again
LEAST_SPEECH = 0.5  # share of a doubted segment that must be speech


def gates_for(window: Window, gates: QualityGates) -> QualityGates:
    """Stricter gates where the detector is not sure of speech: then the decoder has to be."""
    if not window.is_faint or gates.no_speech_prob is None or gates.avg_logprob is None:
        return gates
    return replace(gates, no_speech_prob=0.0, avg_logprob=FAINT_DOUBT * gates.avg_logprob)


def without_hallucinations(
    part: WindowTranscript, window: Window, gates: QualityGates
) -> WindowTranscript:
    """Take the text from segments that the decoder doubts and that are mostly without speech.

    The segments stay, since the words of the others are aligned beside theirs.
    """
    if window.speech is None or gates.avg_logprob is None or part.is_sent:
        return part
    limit, speech = gates.avg_logprob, window.speech
    segments = tuple(
        replace(segment, text="")
        if _avg_logprob(segment) < limit and _speech_share(segment, speech) < LEAST_SPEECH
        else segment
        for segment in part.segments
    )
    return replace(part, segments=segments)


def unheard_from(part: WindowTranscript, window: Window) -> float | None:
    """Where speech begins that the decoder stopped before, in seconds of the upload.

    None where there is less than `MIN_UNHEARD_S` of it, or where it is the whole part.
    """
    if window.speech is None or not part.segments or part.is_sent:
        return None
    limit_s = part.offset_s + part.duration_s
    end_s = min(limit_s, max(segment.end for segment in part.segments))
    left = [
        (max(end_s, first / SAMPLE_RATE), min(limit_s, last / SAMPLE_RATE))
        for first, last in window.speech
        if end_s < last / SAMPLE_RATE and first / SAMPLE_RATE < limit_s
    ]
    if sum(last_s - first_s for first_s, last_s in left) < MIN_UNHEARD_S:
        return None
    start_s = max(end_s, left[0][0] - LEAD_S)
    return start_s if start_s > part.offset_s else None


def _avg_logprob(segment: Segment) -> float:
    """The mean over the segment's own tokens; its field of that name is the window's."""
    return fmean(segment.logprobs) if segment.logprobs else 0.0


def _speech_share(segment: Segment, speech: tuple[tuple[int, int], ...]) -> float:
    """How much of the segment's time the detector took for speech."""
    start, end = (round(at_s * SAMPLE_RATE) for at_s in (segment.start, segment.end))
    heard = sum(max(0, min(end, last) - max(start, first)) for first, last in speech)
    return heard / max(1, end - start)

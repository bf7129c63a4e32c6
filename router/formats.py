"""A finished transcript as the body of an answer, in each response format.

Knows the shapes of OpenAI's API (`router.schemas` documents them), nothing of HTTP beyond the
media type. Bodies are built from plain dicts: validating them again would cost more than
writing them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from cluster.model.languages import language_name
from router.gather import Segment, Transcript
from router.schemas import ResponseFormat

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class RenderedTranscript:
    """Bytes to send, and what they are."""

    body: bytes
    media_type: str


def render(transcript: Transcript, response_format: ResponseFormat) -> RenderedTranscript:
    """Write `transcript` in the format that was asked for."""
    match response_format:
        case "text":
            return RenderedTranscript(f"{transcript.text}\n".encode(), TEXT_TYPE)
        case "json":
            return _json({"text": transcript.text, "usage": _usage(transcript)})
        case "verbose_json":
            return _json(_verbose(transcript))


def _verbose(transcript: Transcript) -> dict[str, Any]:
    return {
        "task": transcript.task,
        "language": language_name(transcript.language),
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "segments": [_segment(segment) for segment in transcript.segments],
        "usage": _usage(transcript),
    }


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration_s)}


def _json(content: dict[str, Any]) -> RenderedTranscript:
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return RenderedTranscript(text.encode(), JSON_TYPE)

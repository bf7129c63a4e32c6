"""A finished transcript as the body of an answer, in each response format.

Knows the shapes of OpenAI's API (`router.api.responses` documents them), nothing of HTTP beyond the
media type. Bodies are built from plain dicts: validating them again would cost more than
writing them. Subtitles are whole segments, one cue each, so that a stream of cues and a whole
file are the same text. `WRITERS` make the files of openai/whisper's command, for our own and for
`/asr`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.common.model.text.languages import language_name
from router.api.params import ResponseFormat
from router.api.subtitles import VTT_HEADER, CueOptions, srt, srt_cue, tsv, txt, vtt, vtt_cue
from router.transcript import Segment, TokenLogprob, Transcript, Word

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"
VTT_TYPE = "text/vtt; charset=utf-8"
POSITIONS_PER_S = 50  # of the encoder


@dataclass(frozen=True, slots=True)
class RenderedTranscript:
    """Bytes to send, and what they are."""

    body: bytes
    media_type: str


def render(
    transcript: Transcript,
    response_format: ResponseFormat,
    *,
    words: bool = False,
    segments: bool = True,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> RenderedTranscript:
    """The bytes of `answer_of`."""
    answer = answer_of(
        transcript, response_format, words=words, segments=segments, logprobs=logprobs
    )
    if isinstance(answer, str):
        media_type = VTT_TYPE if response_format == "vtt" else TEXT_TYPE
        return RenderedTranscript(answer.encode(), media_type)
    return RenderedTranscript(to_json(answer).encode(), JSON_TYPE)


def answer_of(
    transcript: Transcript,
    response_format: ResponseFormat,
    *,
    words: bool = False,
    segments: bool = True,
    logprobs: Sequence[TokenLogprob] | None = None,
) -> dict[str, Any] | str:
    """`transcript` in the format that was asked for: a JSON document, or a text.

    Args:
        words, segments: what verbose_json shall list.
        logprobs: of the text's tokens, for json; None where they were not asked for.
    """
    match response_format:
        case "text":
            return f"{transcript.text}\n"
        case "srt" | "vtt":
            return subtitles(transcript.segments, response_format)
        case "json":
            return json_body(transcript, logprobs)
        case "verbose_json":
            return verbose_body(transcript, words=words, segments=segments)


def json_body(
    transcript: Transcript, logprobs: Sequence[TokenLogprob] | None = None
) -> dict[str, Any]:
    """`response_format=json`; a translation has its text only."""
    if transcript.task == "translate":
        return {"text": transcript.text}
    body: dict[str, Any] = {"text": transcript.text, "usage": usage(transcript)}
    if logprobs is not None:
        body["logprobs"] = logprob_bodies(logprobs)
    return body


def verbose_body(transcript: Transcript, *, words: bool, segments: bool) -> dict[str, Any]:
    """`response_format=verbose_json`. A translation's language is that of its text."""
    translated = transcript.task == "translate"
    body: dict[str, Any] = {
        "task": transcript.task,
        "language": "english" if translated else language_name(transcript.language),
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
    }
    if segments:
        body["segments"] = segment_bodies(transcript.segments)
    if words:
        body["words"] = [_word(word) for word in transcript.words]
    if not translated:
        body["usage"] = usage(transcript)
    return body


def subtitles(
    segments: Sequence[Segment], response_format: ResponseFormat, first_number: int = 1
) -> str:
    """Cues of an srt or vtt file; the vtt header stands before the first."""
    if response_format == "srt":
        return "".join(srt_cue(i, one) for i, one in enumerate(segments, start=first_number))
    header = VTT_HEADER if first_number == 1 else ""
    return header + "".join(map(vtt_cue, segments))


def segment_bodies(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    return [
        {
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
        for segment in segments
    ]


def logprob_bodies(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [
        {"token": one.token, "logprob": one.logprob, "bytes": list(one.bytes)} for one in logprobs
    ]


def usage(transcript: Transcript) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcript.duration_s)}


def token_usage(transcript: Transcript) -> dict[str, Any]:
    """As OpenAI's streams tell it; see `router.api.responses.TokenUsage`."""
    audio_tokens = math.ceil(transcript.duration_s * POSITIONS_PER_S)
    output_tokens = sum(len(segment.tokens) for segment in transcript.segments)
    return {
        "type": "tokens",
        "input_tokens": audio_tokens,
        "output_tokens": output_tokens,
        "total_tokens": audio_tokens + output_tokens,
        "input_token_details": {"text_tokens": 0, "audio_tokens": audio_tokens},
        "seconds": math.ceil(transcript.duration_s),
    }


def to_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _word(word: Word) -> dict[str, Any]:
    return {
        "word": word.word.strip(),
        "start": word.start,
        "end": word.end,
        "probability": round(word.probability, 4),
    }


Writer = Callable[[Transcript, CueOptions], str]


def whisper_json(transcript: Transcript) -> str:
    """openai/whisper's result; segments have words only where words were asked for."""
    content = {
        "text": transcript.text,
        "segments": [_whisper_segment(segment) for segment in transcript.segments],
        "language": transcript.language,
    }
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS: dict[str, Writer] = {
    "txt": lambda transcript, _: txt(transcript.segments),
    "vtt": lambda transcript, cues: vtt(transcript.segments, cues),
    "srt": lambda transcript, cues: srt(transcript.segments, cues),
    "tsv": lambda transcript, _: tsv(transcript.segments),
    "json": lambda transcript, _: whisper_json(transcript),
}


def _whisper_segment(segment: Segment) -> dict[str, Any]:
    (fields,) = segment_bodies([segment])
    if segment.words:
        fields["words"] = [_whisper_word(word) for word in segment.words]
    return fields


def _whisper_word(word: Word) -> dict[str, Any]:
    fields: dict[str, Any] = {"word": word.word, "start": word.start, "end": word.end}
    if not math.isnan(word.probability):  # another server's answer has none
        fields["probability"] = word.probability
    return fields

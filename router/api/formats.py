"""Write a finished transcript in each response format.

Subtitles have one cue per segment, so that a stream of cues and a whole file are the same text.
`WRITERS` write the files of openai/whisper's command, for our command and for `/asr`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from cluster.common.model.text.languages import language_name
from router.api.params import ResponseFormat, TranscriptionParams
from router.api.responses import SegmentResponse
from router.api.subtitles import VTT_HEADER, CueOptions, srt, srt_cue, tsv, txt, vtt, vtt_cue
from router.transcript import Alignment, Segment, TokenLogprob, Transcript, Word

JSON_TYPE = "application/json"
TEXT_TYPE = "text/plain; charset=utf-8"
VTT_TYPE = "text/vtt; charset=utf-8"
POSITIONS_PER_S = 50  # encoder positions per second of audio
WITH_CHANNELS = ("verbose_json", "diarized_json")
NOBODY = "unknown"  # speaker of a segment that is near no turn


def render(
    transcript: Transcript, params: TranscriptionParams, logprobs: Sequence[TokenLogprob] = ()
) -> tuple[bytes, str]:
    """Returns the body and its media type."""
    answer = answer_of(transcript, params, logprobs)
    if isinstance(answer, dict):
        return to_json(answer).encode(), JSON_TYPE
    return answer.encode(), VTT_TYPE if params.response_format == "vtt" else TEXT_TYPE


def answer_of(
    transcript: Transcript, params: TranscriptionParams, logprobs: Sequence[TokenLogprob] = ()
) -> dict[str, Any] | str:
    match params.response_format:
        case "text":
            return f"{transcript.text}\n"
        case "srt" | "vtt" as subtitle_format:
            return subtitles(transcript.segments, subtitle_format)
    return document_of(transcript, params, logprobs)


def document_of(
    transcript: Transcript, params: TranscriptionParams, logprobs: Sequence[TokenLogprob] = ()
) -> dict[str, Any]:
    """The JSON document of a transcript; formats without one get that of `json`."""
    if transcript.alignment is not None:
        return _alignment(transcript, transcript.alignment)
    translated = transcript.task == "translate"
    body: dict[str, Any] = {"text": transcript.text}
    if params.response_format == "diarized_json":
        duration_s = round(transcript.duration_s, 3)
        body = {"task": transcript.task, "duration": duration_s, **body}
        body["segments"] = diarized_bodies(transcript.segments)
    elif params.response_format == "verbose_json":
        language = "english" if translated else language_name(transcript.language)
        duration_s = round(transcript.duration_s, 3)
        body = {"task": transcript.task, "language": language, "duration": duration_s, **body}
        if translated:
            body["source_language"] = language_name(transcript.language)
        if params.segments:
            body["segments"] = segment_bodies(transcript.segments)
        if params.words:
            body["words"] = [_word(word) for word in transcript.words]
    elif params.languages:
        body["languages"] = [{"code": transcript.language}] if transcript.text else []
    if transcript.channels and params.response_format in WITH_CHANNELS:
        body["channels"] = [_given(channel) for channel in transcript.channels]
    if not translated or params.response_format == "diarized_json":
        body["usage"] = {"type": "duration", "seconds": math.ceil(transcript.transcribed_s)}
    if params.logprobs:
        body["logprobs"] = logprob_bodies(logprobs)
    return body


def _alignment(transcript: Transcript, alignment: Alignment) -> dict[str, Any]:
    times = [word.time for word in alignment.words]
    lines: list[list[Word]] = [[] for _ in alignment.lines]
    for word in alignment.words:
        if word.time is not None:
            lines[word.line].append(word.time)
    return {
        "task": "align",
        "language": language_name(transcript.language),
        "duration": round(transcript.duration_s, 3),
        "text": transcript.text,
        "words": [
            {"word": word.text.strip(), **_times([] if time is None else [time])}
            for word, time in zip(alignment.words, times, strict=True)
        ],
        "lines": [
            {"text": line, **_times(said)}
            for line, said in zip(alignment.lines, lines, strict=True)
        ],
        "heard_alone": [asdict(one) for one in alignment.heard_alone],
        "usage": {"type": "duration", "seconds": math.ceil(transcript.duration_s)},
    }


def _times(said: Sequence[Word]) -> dict[str, float | None]:
    if not said:
        return {"start": None, "end": None, "confidence": None}
    confidence = round(fmean(word.probability for word in said), 4)
    end = max(word.end for word in said)
    return {"start": said[0].start, "end": end, "confidence": confidence}


def subtitles(
    segments: Sequence[Segment], response_format: ResponseFormat, first_number: int = 1
) -> str:
    if response_format == "srt":
        return "".join(srt_cue(i, one) for i, one in enumerate(segments, start=first_number))
    header = VTT_HEADER if first_number == 1 else ""
    return header + "".join(map(vtt_cue, segments))


_SEGMENT = tuple(name for name in SegmentResponse.model_fields if name != "speaker")


def _named(body: dict[str, Any], speaker: str | None) -> dict[str, Any]:
    return body if speaker is None else {**body, "speaker": speaker}


def _given(value: Any) -> dict[str, Any]:
    return {name: one for name, one in asdict(value).items() if one is not None}


def segment_bodies(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    bodies = []
    for segment in segments:
        body = {name: getattr(segment, name) for name in _SEGMENT}
        bodies.append(_named(body | {"tokens": list(segment.tokens)}, segment.speaker))
    return bodies


def worded_bodies(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """As `segment_bodies`, each with its words as they are in the text, if there are any."""
    bodies = segment_bodies(segments)
    for body, segment in zip(bodies, segments, strict=True):
        if segment.words:
            body["words"] = [_whisper_word(word) for word in segment.words]
    return bodies


def diarized_bodies(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    return [
        {
            "type": "transcript.text.segment",
            "id": f"seg_{segment.id}",
            "start": segment.start,
            "end": segment.end,
            "text": segment.text,
            "speaker": segment.speaker or NOBODY,
        }
        for segment in segments
    ]


def logprob_bodies(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [asdict(one) | {"bytes": list(one.bytes)} for one in logprobs]


def token_usage(transcript: Transcript) -> dict[str, Any]:
    """Usage at the end of a stream: OpenAI's fields, and the seconds of audio. Audio tokens are
    encoder positions, output tokens include timestamps, and the prompt is not counted.
    """
    audio_tokens = math.ceil(transcript.transcribed_s * POSITIONS_PER_S)
    output_tokens = sum(len(segment.tokens) for segment in transcript.segments)
    return {
        "type": "tokens",
        "input_tokens": audio_tokens,
        "output_tokens": output_tokens,
        "total_tokens": audio_tokens + output_tokens,
        "input_token_details": {"text_tokens": 0, "audio_tokens": audio_tokens},
        "seconds": math.ceil(transcript.transcribed_s),
    }


def to_json(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _word(word: Word) -> dict[str, Any]:
    body = {
        "word": word.word.strip(),
        "start": word.start,
        "end": word.end,
        "probability": round(word.probability, 4),
    }
    return _named(body, word.speaker)


Writer = Callable[[Transcript, CueOptions], str]


def whisper_json(transcript: Transcript) -> str:
    """The JSON file of openai/whisper's command."""
    segments = worded_bodies(transcript.segments)
    content = {"text": transcript.text, "segments": segments, "language": transcript.language}
    return json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n"


WRITERS: dict[str, Writer] = {
    "txt": lambda transcript, _: txt(transcript.segments),
    "vtt": lambda transcript, cues: vtt(transcript.segments, cues),
    "srt": lambda transcript, cues: srt(transcript.segments, cues),
    "tsv": lambda transcript, _: tsv(transcript.segments),
    "json": lambda transcript, _: whisper_json(transcript),
}


def _whisper_word(word: Word) -> dict[str, Any]:
    fields: dict[str, Any] = {"word": word.word, "start": word.start, "end": word.end}
    if not math.isnan(word.probability):  # NaN if another server's answer has none
        fields["probability"] = word.probability
    return _named(fields, word.speaker)

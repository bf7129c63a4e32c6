"""The bodies of answers, as the API's documentation shows them.

Answers themselves are plain dicts (`router.api.formats`, `router.http.sse`), because validation
costs more than writing them. Tests compare the dicts with these models.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from cluster.common.errors import SplitscribeError


class DurationUsage(BaseModel):
    """The audio that is counted for a request."""

    type: Literal["duration"] = "duration"
    seconds: int = Field(description="seconds of audio, rounded up")


class LogprobResponse(BaseModel):
    """One token of the text (`include[]=logprobs`)."""

    token: str = Field(description="U+FFFD stands for a part of a character")
    logprob: float
    bytes: list[int] = Field(description="the token's UTF-8")


class LanguageResponse(BaseModel):
    code: str


class TranscriptionResponse(BaseModel):
    """`response_format=json`."""

    text: str
    languages: list[LanguageResponse] | None = Field(
        None, description="where several were allowed: the one that was found, if there is text"
    )
    usage: DurationUsage
    logprobs: list[LogprobResponse] | None = None


class SegmentResponse(BaseModel):
    """A stretch of speech. Times are in seconds from the start of the audio."""

    id: int
    seek: int = Field(description="start of the segment's window, in hundredths of a second")
    start: float
    end: float
    text: str = Field(description="keeps its leading space")
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    speaker: str | None = Field(None, description="where speakers were asked for and one is found")


class WordResponse(BaseModel):
    """One word with its punctuation. Times are in seconds from the start of the audio."""

    word: str
    start: float
    end: float
    probability: float = Field(
        description="mean of its tokens'; not OpenAI's, but openai/whisper's"
    )
    speaker: str | None = Field(None, description="as of a segment")


class ChannelResponse(BaseModel):
    """One channel of the file (`channels=separate`)."""

    channel: int = Field(description="from 1")
    speaker: str | None = Field(None, description="whose it is, if it was transcribed")
    same_as: int | None = Field(None, description="the channel with the same sound, if any")


class VerboseTranscriptionResponse(BaseModel):
    """`response_format=verbose_json`. `timestamp_granularities[]` selects segments and words."""

    task: Literal["transcribe"]
    language: str = Field(description="English name, such as 'english'")
    duration: float = Field(description="seconds of audio")
    text: str
    segments: list[SegmentResponse] | None = None
    words: list[WordResponse] | None = None
    channels: list[ChannelResponse] | None = Field(None, description="with `channels=separate`")
    usage: DurationUsage


class DiarizedSegment(BaseModel):
    """A stretch of one speaker. Times are in seconds from the start of the audio."""

    type: Literal["transcript.text.segment"] = "transcript.text.segment"
    id: str
    start: float
    end: float
    text: str = Field(description="keeps its leading space")
    speaker: str = Field(description="a known name, `A`, `B` ..., or the channel's")


class DiarizedTranscriptionResponse(BaseModel):
    """`response_format=diarized_json`."""

    task: Literal["transcribe", "translate"]
    duration: float = Field(description="seconds of audio")
    text: str = Field(description="a line for each turn, with the speaker before it")
    segments: list[DiarizedSegment]
    channels: list[ChannelResponse] | None = Field(None, description="with `channels=separate`")
    usage: DurationUsage


class TranslationResponse(BaseModel):
    """`response_format=json` of a translation."""

    text: str


class VerboseTranslationResponse(BaseModel):
    """`response_format=verbose_json` of a translation."""

    task: Literal["translate"]
    language: Literal["english"]
    source_language: str = Field(description="the spoken one; not in OpenAI's API")
    duration: float = Field(description="seconds of audio")
    text: str
    segments: list[SegmentResponse] | None = None
    words: list[WordResponse] | None = None
    channels: list[ChannelResponse] | None = Field(None, description="with `channels=separate`")


class AlignedWordResponse(BaseModel):
    """A word of the text with its punctuation. Times are in seconds; null if it is not spoken."""

    word: str
    start: float | None
    end: float | None
    confidence: float | None = Field(description="mean probability of its tokens")


class AlignedLineResponse(BaseModel):
    """A line of the text. Its times span the words of it that are spoken."""

    text: str
    start: float | None
    end: float | None
    confidence: float | None


class HeardAloneResponse(BaseModel):
    """Speech in the audio that is missing in the text."""

    start: float
    end: float
    text: str


class AlignmentResponse(BaseModel):
    """A known text with the times at which it is spoken."""

    task: Literal["align"]
    language: str = Field(description="English name, such as 'english'")
    duration: float = Field(description="seconds of audio")
    text: str
    words: list[AlignedWordResponse]
    lines: list[AlignedLineResponse]
    heard_alone: list[HeardAloneResponse]
    usage: DurationUsage


class DetectedLanguageResponse(BaseModel):
    """The answer of `/detect-language`."""

    detected_language: str = Field(description="English name, such as 'english'")
    language_code: str
    confidence: float = Field(description="its probability among all languages")


class ModelResponse(BaseModel):
    """A model that requests can name."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time")
    owned_by: str
    description: str | None = Field(None, description="what to know of it first; often left out")


class ModelListResponse(BaseModel):
    """The list of models."""

    object: Literal["list"] = "list"
    data: list[ModelResponse]


class ErrorBody(BaseModel):
    """An error with the fields that OpenAI's clients read."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not a success."""

    error: ErrorBody


def error_body(error: SplitscribeError) -> dict[str, Any]:
    return envelope(error.message, error.type, error.param, error.code)


def envelope(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

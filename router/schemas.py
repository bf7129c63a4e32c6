"""The fields of a transcription request, checked, and the bodies that answer it.

Takes form fields as (name, text) pairs in any order and gives one frozen `TranscriptionParams`.
Every field that this server does not know or offer is refused by name: a client learns from a
400 what it would otherwise miss in the text. Knows nothing of multipart parsing or of HTTP.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import BaseModel, Field

from cluster.errors import InvalidRequestError, UnsupportedValueError
from cluster.messages import QualityGates, Task
from cluster.model.languages import language_code

ResponseFormat = Literal["json", "text", "verbose_json"]

RESPONSE_FORMATS: tuple[str, ...] = get_args(ResponseFormat)
OTHER_FORMATS = ("srt", "vtt", "diarized_json")  # OpenAI's, not offered here
SCALAR_FIELDS = (
    "model",
    "language",
    "prompt",
    "response_format",
    "temperature",
    "seed",
    "stream",
)
LIST_FIELDS = ("timestamp_granularities",)
OTHER_FIELDS = (  # of OpenAI or of common extensions, not offered here
    "include",
    "chunking_strategy",
    "known_speaker_names",
    "known_speaker_references",
    "languages",
    "keywords",
    "hotwords",
)
MAX_SEED = 2**63 - 1
_SHOWN = 64  # characters of a client's value that an error message repeats


Decoding = Literal["parallel", "sequential"]
LADDER = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # openai/whisper's temperatures


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the voice detector cuts (`chunking_strategy`); OpenAI's defaults."""

    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 200


@dataclass(frozen=True, slots=True)
class SequentialOptions:
    """What only sequential mode knows, under openai/whisper's names and with its defaults.

    clip_timestamps: start, end, start, end, ... in seconds; a last start without an end lasts
        to the end of the file.
    """

    condition_on_previous_text: bool = True
    carry_initial_prompt: bool = False
    hallucination_silence_threshold: float | None = None
    clip_timestamps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptionParams:
    """A checked request.

    model: name as the client spelled it; language: code, or None to detect it; prompt: text
    that came before the audio; hotwords: words to expect; temperature: 0 is greedy; fallback:
    try higher temperatures where an attempt fails `gates` (only from temperature 0 on); seed: of
    the sampling noise, None for one drawn at random; words, segments, logprobs: what the answer
    shall hold; stream: send it as it becomes certain; chunking: None leaves the cuts to the server.
    """

    model: str
    language: str | None = None
    prompt: str | None = None
    hotwords: str | None = None
    temperature: float = 0.0
    fallback: bool = True
    seed: int | None = None
    response_format: ResponseFormat = "json"
    task: Task = "transcribe"
    stream: bool = False
    words: bool = False
    segments: bool = True
    logprobs: bool = False
    chunking: Chunking | None = None
    decoding: Decoding = "parallel"
    sequential: SequentialOptions = SequentialOptions()
    beam_size: int = 1
    patience: float = 1.0
    best_of: int = 1
    length_penalty: float | None = None
    gates: QualityGates = QualityGates(keep="best")

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Tried in order."""
        return LADDER if self.fallback and self.temperature == 0 else (self.temperature,)


def parse_transcription(
    fields: Iterable[tuple[str, str]], languages: Collection[str]
) -> TranscriptionParams:
    """Check a form.

    Args:
        fields: names and texts of all parts but the file.
        languages: codes that the model knows.

    Raises:
        UnsupportedValueError: a field or value of OpenAI's that is not offered here.
        InvalidRequestError: an unknown or repeated field, or a value that is no such thing.
    """
    scalars: dict[str, str] = {}
    for raw_name, value in fields:
        name = _known_name(raw_name)
        if name in LIST_FIELDS:
            _check_granularities(value)
        elif name in scalars:
            raise InvalidRequestError(f"'{name}' was sent more than once; send it once", param=name)
        else:
            scalars[name] = value
    if not scalars.get("model", "").strip():
        raise InvalidRequestError("you must provide a 'model' parameter", param="model")
    _check_stream(scalars.get("stream"))
    return TranscriptionParams(
        model=scalars["model"].strip(),
        language=_language(scalars.get("language"), languages),
        prompt=scalars.get("prompt") or None,
        temperature=_temperature(scalars.get("temperature")),
        seed=_seed(scalars.get("seed")),
        response_format=_response_format(scalars.get("response_format")),
    )


def _known_name(raw: str) -> str:
    """`name` of `name`, `name[]` and `name[key]`; refuses what is not offered."""
    name, bracket, rest = raw.partition("[")
    if name in OTHER_FIELDS:
        raise UnsupportedValueError(f"'{name}' is not supported by this server", param=name)
    is_list = name in LIST_FIELDS and (not bracket or rest.rstrip("]").isdigit() or rest == "]")
    if is_list or (name in SCALAR_FIELDS and not bracket):
        return name
    taken = ", ".join(("file", *SCALAR_FIELDS, *(f"{field}[]" for field in LIST_FIELDS)))
    raise InvalidRequestError(
        f"unknown field {_shown(raw)}; this endpoint takes: {taken}",
        param=raw[:_SHOWN],
        code="unknown_parameter",
    )


def _check_granularities(value: str) -> None:
    """`segment` is what every answer has; `word` is refused, in a JSON list as well."""
    param = "timestamp_granularities"
    items: object = [value]
    if value.lstrip().startswith("["):
        try:
            items = json.loads(value)
        except ValueError:
            items = [value]
    for item in items if isinstance(items, list) else [items]:
        if item == "word":
            raise UnsupportedValueError(
                "timestamp granularity 'word' is not supported by this server; use 'segment'",
                param=param,
            )
        if item != "segment":
            raise InvalidRequestError(
                f"{_shown(item)} is no timestamp granularity; use 'segment'", param=param
            )


def _check_stream(value: str | None) -> None:
    if value is None or value.lower() in ("false", "0", ""):
        return
    if value.lower() in ("true", "1"):
        raise UnsupportedValueError(
            "'stream' is not supported by this server; send stream=false", param="stream"
        )
    raise InvalidRequestError(
        f"'stream' must be true or false, not {_shown(value)}", param="stream"
    )


def _language(value: str | None, languages: Collection[str]) -> str | None:
    if value is None or not value.strip():
        return None
    code = language_code(value)
    if code is None:
        raise InvalidRequestError(
            f"{_shown(value)} is no language that is known here; send an ISO-639-1 code such as "
            f"'en', an English name such as 'english', or leave it out to have it detected",
            param="language",
            code="invalid_language_format",
        )
    if code not in languages:
        raise UnsupportedValueError(
            f"this model does not know language {_shown(value)}; "
            f"it knows: {', '.join(sorted(languages))}",
            param="language",
        )
    return code


def _temperature(value: str | None) -> float:
    if value is None or not value.strip():
        return 0.0
    try:
        temperature = float(value)
    except ValueError:
        temperature = math.nan
    if not 0.0 <= temperature <= 1.0:
        raise InvalidRequestError(
            f"'temperature' must be a number from 0 to 1, not {_shown(value)}", param="temperature"
        )
    return temperature


def _seed(value: str | None) -> int | None:
    if value is None or not value.strip():
        return None
    digits = value.strip()
    is_number = len(digits) <= len(str(MAX_SEED)) and digits.isascii() and digits.isdigit()
    if not is_number or int(digits) > MAX_SEED:
        raise InvalidRequestError(
            f"'seed' must be a whole number from 0 to {MAX_SEED}, not {_shown(value)}", param="seed"
        )
    return int(digits)


def _response_format(value: str | None) -> ResponseFormat:
    match value:
        case None:
            return "json"
        case "json" | "text" | "verbose_json":
            return value
    offered = ", ".join(f"'{name}'" for name in RESPONSE_FORMATS)
    if value in OTHER_FORMATS:
        raise UnsupportedValueError(
            f"response_format '{value}' is not supported by this server; use one of {offered}",
            param="response_format",
        )
    raise InvalidRequestError(
        f"{_shown(value)} is no response_format; use one of {offered}",
        param="response_format",
        code="invalid_value",
    )


def _shown(value: object) -> str:
    """A client's value, quoted, on one line and cut to a sensible length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class DurationUsage(BaseModel):
    """What a request is billed by."""

    type: Literal["duration"] = "duration"
    seconds: int = Field(description="seconds of audio, rounded up")


class TranscriptionResponse(BaseModel):
    """`response_format=json`."""

    text: str
    usage: DurationUsage


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


class VerboseTranscriptionResponse(BaseModel):
    """`response_format=verbose_json`."""

    task: Literal["transcribe", "translate"]
    language: str = Field(description="English name, such as 'english'")
    duration: float = Field(description="seconds of audio")
    text: str
    segments: list[SegmentResponse]
    usage: DurationUsage


class ModelResponse(BaseModel):
    """One model that may be named in a request."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix time")
    owned_by: str


class ModelListResponse(BaseModel):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[ModelResponse]


class ErrorBody(BaseModel):
    """What went wrong, as OpenAI's clients read it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is not a success."""

    error: ErrorBody

"""Reads a client's updates of a realtime session's configuration, and writes the configuration.

A missing field keeps its value, null resets it to its default, and an invalid value is refused.
Unknown fields are ignored, since many clients fail on an error about one.
Sources: https://developers.openai.com/api/docs/guides/realtime-transcription and openai-python's
`types/realtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar, get_args

from cluster.common.errors import InvalidRequestError, UnsupportedValueError
from router.api.kinds import (
    Boolean,
    Choice,
    Integer,
    Kind,
    Language,
    ListOf,
    Number,
    Text,
    as_object,
    shown,
)
from router.live.interface import (
    Delay,
    Eagerness,
    LiveConfig,
    SemanticVad,
    ServerVad,
    TurnDetection,
)
from router.live.protocol.audio_format import G711_RATE, AudioFormat

LOGPROBS = "item.input_audio_transcription.logprobs"

PCM_24_KHZ = AudioFormat()
MAX_SILENCE_MS = 60_000
# Fields of LiveConfig and of the two kinds of turn detection, by attribute name. The model comes
# first, since other fields depend on it.
TRANSCRIPTION: Mapping[str, Kind] = {
    "model": Text(longest=256),
    "language": Language(),
    "languages": ListOf(Language(), most=100),
    "prompt": Text(longest=10_000),  # Whisper reads the last 223 tokens
    "keywords": ListOf(Text(longest=200), most=256),
    "delay": Choice(get_args(Delay)),
    "diarize": Boolean(),
}
SERVER_VAD: Mapping[str, Kind] = {
    "threshold": Number(0, 1),
    "prefix_padding_ms": Integer(0, MAX_SILENCE_MS),
    "silence_duration_ms": Integer(0, MAX_SILENCE_MS),
    "idle_timeout_ms": Integer(0, MAX_SILENCE_MS),
}
SEMANTIC_VAD: Mapping[str, Kind] = {"eagerness": Choice(get_args(Eagerness))}
RATE = Integer(8_000, 48_000)
NOISE_REDUCTION = Choice(("near_field", "far_field"))
INCLUDE = ListOf(Text(longest=256), most=64)
DETECTIONS = Choice(("server_vad", "semantic_vad"))
PARTS = {
    "format": ("type", "rate"),
    "noise_reduction": ("type",),
    "transcription": (*TRANSCRIPTION,),
    "turn_detection": ("type", *SERVER_VAD, *SEMANTIC_VAD),
}
NAMES = (*PARTS,)  # fields of `audio.input`
# Session fields of OpenAI's beta. They are refused, since the audio would be misread without them.
WITHDRAWN = ("input_audio_format", "input_audio_transcription", "input_audio_noise_reduction")

Part = TypeVar("Part", LiveConfig, ServerVad, SemanticVad)


@dataclass(frozen=True, slots=True)
class SessionConfig:
    audio: AudioFormat = PCM_24_KHZ
    noise_reduction: str | None = None  # only echoed: Whisper was trained on noisy audio
    live: LiveConfig = field(default_factory=LiveConfig)
    turn_detection_chosen: bool = False  # False: the model's name decides


@dataclass(frozen=True, slots=True)
class ModelNames:
    languages: Callable[[str], Collection[str]]  # of a model; raises ModelNotFoundError
    are_one: Callable[[str, str], bool]  # whether both names mean the same model
    without_vad: Collection[str] = ()  # models without turn detection by default


def updated(config: SessionConfig, sent: object, names: ModelNames) -> SessionConfig:
    """Raises InvalidRequestError or ModelNotFoundError."""
    try:
        for name, value, where in _fields(as_object("session", sent)):
            config = _with_field(config, name, value, where, names)
    except InvalidRequestError as error:
        error.code = error.code or "invalid_value"
        raise
    live = config.live
    known = names.languages(live.model)
    for code in (*live.languages, live.language):
        if code is not None and code not in known:
            raise UnsupportedValueError(
                f"The model '{live.model}' does not support the language '{code}'; it supports: "
                f"{', '.join(sorted(known))}",
                param="session.audio.input.transcription.language",
            )
    if config.turn_detection_chosen:
        return config
    usual = None if live.model in names.without_vad else ServerVad()
    return replace(config, live=replace(live, turn_detection=usual))


def _fields(session: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (field, value, name in errors). A null object gives null for each of its fields."""
    kind = session.get("type")
    if kind not in (None, "transcription"):
        raise UnsupportedValueError(
            f"Sessions of type {shown(kind)} are not supported; the only type is 'transcription'",
            param="session.type",
        )
    for name in WITHDRAWN:
        if name in session:
            raise InvalidRequestError(
                f"'{name}' belongs to the beta of OpenAI's realtime protocol, which was withdrawn; "
                "set the fields of 'session.audio.input' instead",
                param=f"session.{name}",
                code="unknown_parameter",
            )
    if "include" in session:
        yield "include", session["include"], "session.include"
    if "audio" not in session:
        return
    audio = session["audio"]
    fields = None if audio is None else as_object("session.audio", audio).get("input", {})
    fields = dict.fromkeys(NAMES) if fields is None else as_object("session.audio.input", fields)
    for name in NAMES:
        if name in fields:
            yield name, fields[name], f"session.audio.input.{name}"


def known_fields(session: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a valid configuration that are read, in the same shape."""
    known: dict[str, Any] = {"type": session["type"]} if "type" in session else {}
    for name, value, _ in _fields(session):
        node = known if name == "include" else known.setdefault("audio", {}).setdefault("input", {})
        parts = PARTS.get(name, ())
        is_object = isinstance(value, Mapping)
        node[name] = {part: value[part] for part in parts if part in value} if is_object else value
    return known


def _with_field(
    config: SessionConfig, name: str, sent: Any, where: str, names: ModelNames
) -> SessionConfig:
    live = config.live
    match name:
        case "format":
            return replace(config, audio=_format(sent, where))
        case "noise_reduction":
            kind = None if sent is None else as_object(where, sent).get("type")
            kind = None if kind is None else NOISE_REDUCTION.parse(f"{where}.type", kind)
            return replace(config, noise_reduction=kind)
        case "transcription":
            return replace(config, live=_transcription(live, sent, where, names))
        case "turn_detection":
            detection = _detection(live.turn_detection, sent, where)
            live = replace(live, turn_detection=detection)
            return replace(config, live=live, turn_detection_chosen=True)
        case _:
            wanted = () if sent is None else INCLUDE.parse(where, sent)
            return replace(config, live=replace(live, logprobs=LOGPROBS in wanted))


def _format(sent: Any, where: str) -> AudioFormat:
    if sent is None:
        return PCM_24_KHZ
    sent = as_object(where, sent)
    match sent.get("type", "audio/pcm"):
        case "audio/pcm":
            rate = sent.get("rate")
            rate = PCM_24_KHZ.rate if rate is None else RATE.parse(f"{where}.rate", rate)
            return AudioFormat("pcm", rate)
        case "audio/pcmu":
            return AudioFormat("pcmu", G711_RATE)
        case "audio/pcma":
            return AudioFormat("pcma", G711_RATE)
        case other:
            raise InvalidRequestError(
                f"The audio format {shown(other)} is not supported; send 'audio/pcm', "
                f"'audio/pcmu' or 'audio/pcma'",
                param=f"{where}.type",
            )


def _transcription(live: LiveConfig, sent: Any, where: str, names: ModelNames) -> LiveConfig:
    fields = dict(dict.fromkeys(TRANSCRIPTION) if sent is None else as_object(where, sent))
    if fields.get("model") is None:
        fields.pop("model", None)  # a session always has a model
    if fields.get("language") in ("", "auto"):  # some clients send these for no choice
        fields["language"] = None
    live = _with_parts(live, fields, TRANSCRIPTION, where)
    names.languages(live.model)
    return live


def _detection(before: TurnDetection, sent: Any, where: str) -> TurnDetection:
    if sent is None:
        return None
    sent = as_object(where, sent)
    kind = sent.get("type", "semantic_vad" if isinstance(before, SemanticVad) else "server_vad")
    if kind == "none":
        return None
    if DETECTIONS.parse(f"{where}.type", kind) == "server_vad":
        server = before if isinstance(before, ServerVad) else ServerVad()
        return _with_parts(server, sent, SERVER_VAD, where)
    semantic = before if isinstance(before, SemanticVad) else SemanticVad()
    return _with_parts(semantic, sent, SEMANTIC_VAD, where)


def _with_parts(part: Part, sent: Mapping[str, Any], kinds: Mapping[str, Kind], where: str) -> Part:
    """Return `part` with the values that were sent; null means the default."""
    usual = type(part)()
    values = {
        name: getattr(usual, name)
        if sent[name] is None
        else kind.parse(f"{where}.{name}", sent[name])
        for name, kind in kinds.items()
        if name in sent
    }
    return replace(part, **values)


def as_session(config: SessionConfig, session_id: str, expires_at: int) -> dict[str, Any]:
    live, form, detection = config.live, config.audio, config.live.turn_detection
    noise = None if config.noise_reduction is None else {"type": config.noise_reduction}
    transcription: dict[str, Any] = {
        "model": live.model,
        "language": live.language,
        "prompt": live.prompt,
    }
    more: dict[str, Any] = {"languages": list(live.languages), "keywords": list(live.keywords)}
    more |= {"delay": live.delay, "diarize": live.diarize}
    transcription |= {name: value for name, value in more.items() if value}
    turns = None
    if detection is not None:
        kind = "server_vad" if isinstance(detection, ServerVad) else "semantic_vad"
        turns = {"type": kind, **asdict(detection)}
    rate = {"rate": form.rate} if form.encoding == "pcm" else {}
    written = {
        "format": {"type": f"audio/{form.encoding}", **rate},
        "noise_reduction": noise,
        "transcription": transcription,
        "turn_detection": turns,
    }
    return {
        "object": "realtime.transcription_session",
        "id": session_id,
        "expires_at": expires_at,
        "include": [LOGPROBS] if live.logprobs else None,
        "type": "transcription",
        "audio": {"input": written},
    }

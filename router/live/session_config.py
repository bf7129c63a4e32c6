"""A realtime session's configuration: read from a client's update, and written into answers.

OpenAI's two shapes are taken, whichever event they come in: the one of today, nested under
`audio.input`, and the flat one of the beta (`input_audio_format` ...). In both a field that is left
out keeps its value, and null takes it back to its default. Fields that are not known are left
alone, since clients die of an error about one; a value that a known field cannot have is refused.
Sources: https://developers.openai.com/api/docs/guides/realtime-transcription and openai-python's
`types/realtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast, get_args

from cluster.errors import InvalidRequestError, UnsupportedValueError
from cluster.model.languages import language_code
from router.live.audio_format import G711_RATE, AudioFormat
from router.live.interface import (
    Delay,
    Eagerness,
    LiveConfig,
    SemanticVad,
    ServerVad,
    TurnDetection,
)

LOGPROBS = "item.input_audio_transcription.logprobs"
MIN_RATE, MAX_RATE = 8_000, 48_000
MAX_PROMPT = 10_000  # characters; Whisper reads the last 223 tokens
MAX_KEYWORDS = 256
MAX_KEYWORD = 200  # characters
MAX_SILENCE_MS = 60_000
SHOWN = 64  # characters of a client's value that an error message repeats

PCM_24_KHZ = AudioFormat()
BETA_FORMATS = {
    "pcm16": PCM_24_KHZ,
    "g711_ulaw": AudioFormat("pcmu", G711_RATE),
    "g711_alaw": AudioFormat("pcma", G711_RATE),
}
NOISE_REDUCTIONS = ("near_field", "far_field")

Sent = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What a session was told to do.

    noise_reduction: kept and repeated to the client; nothing is reduced, since Whisper was trained
        on noise. live: what transcription is told.
    turn_detection_chosen: the client has said how turns end; until then its model's name does.
    """

    audio: AudioFormat = PCM_24_KHZ
    noise_reduction: str | None = None
    live: LiveConfig = field(default_factory=LiveConfig)
    turn_detection_chosen: bool = False


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that `model` may have.

    languages: codes of the languages that a model knows; raises ModelNotFoundError.
    are_one: whether two names mean the same model.
    without_vad: the names whose clients end turns themselves.
    """

    languages: Callable[[str], Collection[str]]
    are_one: Callable[[str, str], bool]
    without_vad: Collection[str] = ()


def updated(config: SessionConfig, sent: object, names: ModelNames) -> SessionConfig:
    """`config` with what a client sent.

    Raises:
        InvalidRequestError: a field has a value that it cannot have; nothing was changed.
        ModelNotFoundError: there is no such model.
    """
    session = _mapping(sent, "session")
    kind = session.get("type")
    if kind not in (None, "transcription"):
        raise UnsupportedValueError(
            f"Sessions of type {_shown(kind)} are not served here; this server transcribes: send "
            f"'transcription'",
            param="session.type",
        )
    config = _read(config, session, _BETA, "session", names)
    if "audio" in session:
        audio = _mapping(session["audio"] or {"input": None}, "session.audio")
        if "input" in audio:
            here = "session.audio.input"
            fields = audio["input"]
            if fields is None:
                fields = dict.fromkeys(_INPUT)
            config = _read(config, _mapping(fields, here), _INPUT, here, names)
    _check_languages(config.live, names)
    return _with_turn_detection_of_its_model(config, names)


def _check_languages(live: LiveConfig, names: ModelNames) -> None:
    known = names.languages(live.model)
    wanted = (*live.languages, *((live.language,) if live.language else ()))
    for code in wanted:
        if code not in known:
            raise UnsupportedValueError(
                f"The model '{live.model}' does not know the language '{code}'; it knows: "
                f"{', '.join(sorted(known))}",
                param="session.audio.input.transcription.language",
            )


def _with_turn_detection_of_its_model(config: SessionConfig, names: ModelNames) -> SessionConfig:
    if config.turn_detection_chosen:
        return config
    usual = None if config.live.model in names.without_vad else ServerVad()
    return replace(config, live=replace(config.live, turn_detection=usual))


# ---- reading: each takes the config, the value (None: null), the parameter's name ----


def _read(
    config: SessionConfig,
    sent: Sent,
    readers: Mapping[str, _Reader],
    where: str,
    names: ModelNames,
) -> SessionConfig:
    for name, read in readers.items():
        if name in sent:
            config = read(config, sent[name], f"{where}.{name}", names)
    return config


_Reader = Callable[[SessionConfig, Any, str, ModelNames], SessionConfig]


def _read_format(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    if sent is None:
        return replace(config, audio=PCM_24_KHZ)
    if isinstance(sent, str):
        if sent in BETA_FORMATS:
            return replace(config, audio=BETA_FORMATS[sent])
        sent = {"type": sent}
    sent = _mapping(sent, param)
    match sent.get("type", "audio/pcm"):
        case "audio/pcm":
            rate = sent.get("rate")
            rate = 24_000 if rate is None else _integer(rate, f"{param}.rate", MIN_RATE, MAX_RATE)
            return replace(config, audio=AudioFormat("pcm", rate))
        case "audio/pcmu":
            return replace(config, audio=BETA_FORMATS["g711_ulaw"])
        case "audio/pcma":
            return replace(config, audio=BETA_FORMATS["g711_alaw"])
        case other:
            raise InvalidRequestError(
                f"The audio format {_shown(other)} is not supported; send 'audio/pcm', "
                f"'audio/pcmu' or 'audio/pcma' (in beta sessions {', '.join(BETA_FORMATS)})",
                param=f"{param}.type",
                code="invalid_value",
            )


def _read_noise(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    kind = None if sent is None else _mapping(sent, param).get("type")
    if kind is not None:
        _choice(kind, f"{param}.type", NOISE_REDUCTIONS)
    return replace(config, noise_reduction=kind)


def _read_turns(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    detection: TurnDetection = None
    if sent is not None:
        sent = _mapping(sent, param)
        before = config.live.turn_detection
        usual = "semantic_vad" if isinstance(before, SemanticVad) else "server_vad"
        match sent.get("type", usual):
            case "server_vad":
                detection = _server_vad(
                    before if isinstance(before, ServerVad) else ServerVad(), sent, param
                )
            case "semantic_vad":
                detection = _semantic_vad(
                    before if isinstance(before, SemanticVad) else SemanticVad(), sent, param
                )
            case "none":
                detection = None
            case other:
                _choice(other, f"{param}.type", ("server_vad", "semantic_vad"))
    return replace(
        config, live=replace(config.live, turn_detection=detection), turn_detection_chosen=True
    )


def _server_vad(vad: ServerVad, sent: Sent, param: str) -> ServerVad:
    usual = ServerVad()
    if "threshold" in sent:
        value = sent["threshold"]
        if value is not None:
            value = _number(value, f"{param}.threshold", 0.0, 1.0)
        vad = replace(vad, threshold=usual.threshold if value is None else value)
    for name in ("prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms"):
        if name in sent:
            value = sent[name]
            if value is not None:
                value = _integer(value, f"{param}.{name}", 0, MAX_SILENCE_MS)
            vad = replace(vad, **{name: getattr(usual, name) if value is None else value})
    return vad


def _semantic_vad(vad: SemanticVad, sent: Sent, param: str) -> SemanticVad:
    if "eagerness" not in sent:
        return vad
    eagerness = sent["eagerness"]
    if eagerness is None:
        return SemanticVad()
    _choice(eagerness, f"{param}.eagerness", get_args(Eagerness))
    return SemanticVad(cast(Eagerness, eagerness))


def _read_transcription(
    config: SessionConfig, sent: Any, param: str, names: ModelNames
) -> SessionConfig:
    fields = dict.fromkeys(_TRANSCRIPTION) if sent is None else _mapping(sent, param)
    return _read(config, fields, _TRANSCRIPTION, param, names)


def _read_model(config: SessionConfig, sent: Any, param: str, names: ModelNames) -> SessionConfig:
    if sent is None:
        return config  # a session always has one
    names.languages(_text(sent, param, 4 * SHOWN))
    return replace(config, live=replace(config.live, model=sent))


def _read_language(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    # Clients whose user chose no language send an empty one.
    code = None if sent in (None, "", "auto") else _language(sent, param)
    return replace(config, live=replace(config.live, language=code))


def _read_languages(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    sent = _texts(sent, param, 100, SHOWN)
    codes = tuple(_language(one, f"{param}[{i}]") for i, one in enumerate(sent))
    return replace(config, live=replace(config.live, languages=codes))


def _read_prompt(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    prompt = "" if sent is None else _text(sent, param, MAX_PROMPT)
    return replace(config, live=replace(config.live, prompt=prompt))


def _read_keywords(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    keywords = _texts(sent, param, MAX_KEYWORDS, MAX_KEYWORD)
    return replace(config, live=replace(config.live, keywords=keywords))


def _read_delay(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    if sent is not None:
        _choice(sent, param, get_args(Delay))
    return replace(config, live=replace(config.live, delay=cast("Delay | None", sent)))


def _read_include(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    wanted = LOGPROBS in _texts(sent, param, 64, 256)
    return replace(config, live=replace(config.live, logprobs=wanted))


# The model first: what else is said may depend on it.
_TRANSCRIPTION: Mapping[str, _Reader] = {
    "model": _read_model,
    "language": _read_language,
    "languages": _read_languages,
    "prompt": _read_prompt,
    "keywords": _read_keywords,
    "delay": _read_delay,
}
_INPUT: Mapping[str, _Reader] = {
    "format": _read_format,
    "noise_reduction": _read_noise,
    "transcription": _read_transcription,
    "turn_detection": _read_turns,
}
_BETA: Mapping[str, _Reader] = {
    "input_audio_format": _read_format,
    "input_audio_noise_reduction": _read_noise,
    "input_audio_transcription": _read_transcription,
    "turn_detection": _read_turns,
    "include": _read_include,
}


# ---- checks of single values ----


def _mapping(sent: object, param: str) -> Sent:
    if not isinstance(sent, Mapping):
        raise _refusal(param, "an object", sent)
    return sent


def _text(sent: object, param: str, longest: int) -> str:
    if not isinstance(sent, str):
        raise _refusal(param, "a string", sent)
    if len(sent) > longest:
        raise InvalidRequestError(
            f"'{param}' has {len(sent)} characters, of at most {longest}",
            param=param,
            code="string_above_max_length",
        )
    if not sent.isascii() and any("\ud800" <= letter <= "\udfff" for letter in sent):
        raise _refusal(param, "Unicode text, without half a surrogate pair", sent)
    return sent


def _texts(sent: object, param: str, most: int, longest: int) -> tuple[str, ...]:
    if sent is None:
        return ()
    if not isinstance(sent, list):
        raise _refusal(param, "an array of strings", sent)
    if len(sent) > most:
        raise InvalidRequestError(
            f"'{param}' has {len(sent)} items, of at most {most}",
            param=param,
            code="array_above_max_length",
        )
    return tuple(_text(one, f"{param}[{i}]", longest) for i, one in enumerate(sent))


def _language(sent: object, param: str) -> str:
    code = language_code(_text(sent, param, SHOWN))
    if code is None:
        raise InvalidRequestError(
            f"{_shown(sent)} is no language that is known here; send an ISO-639-1 code such as "
            f"'en', or leave it out to have it detected",
            param=param,
            code="invalid_language_format",
        )
    return code


def _integer(sent: object, param: str, low: int, high: int) -> int:
    if isinstance(sent, float) and sent.is_integer():
        sent = int(sent)  # from languages that have one kind of numbers
    if isinstance(sent, bool) or not isinstance(sent, int) or not low <= sent <= high:
        raise _refusal(param, f"an integer from {low} to {high}", sent)
    return sent


def _number(sent: object, param: str, low: float, high: float) -> float:
    if isinstance(sent, bool) or not isinstance(sent, int | float) or not low <= sent <= high:
        raise _refusal(param, f"a number from {low:g} to {high:g}", sent)
    return float(sent)


def _choice(sent: object, param: str, allowed: Sequence[str]) -> None:
    if sent not in allowed:
        raise _refusal(param, "one of " + ", ".join(f"'{one}'" for one in allowed), sent)


def _refusal(param: str, expected: str, sent: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}' must be {expected}, got {_shown(sent)}", param=param, code="invalid_value"
    )


def _shown(sent: object) -> str:
    text = repr(sent)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


# ---- writing ----


def as_session(config: SessionConfig, session_id: str, expires_at: int) -> dict[str, Any]:
    """The session object of today's shape."""
    return {
        "type": "transcription",
        "object": "realtime.transcription_session",
        "id": session_id,
        "expires_at": expires_at,
        "audio": {
            "input": {
                "format": _written_format(config.audio),
                "noise_reduction": _written_noise(config),
                "transcription": _written_transcription(config.live),
                "turn_detection": _written_turns(config.live.turn_detection),
            }
        },
        "include": [LOGPROBS] if config.live.logprobs else None,
    }


def as_beta_session(config: SessionConfig, session_id: str, expires_at: int) -> dict[str, Any]:
    """The same session in the beta's flat shape."""
    by_format = {form: name for name, form in BETA_FORMATS.items()}
    return {
        "object": "realtime.transcription_session",
        "id": session_id,
        "expires_at": expires_at,
        "modalities": ["text"],
        "input_audio_format": by_format.get(config.audio, f"pcm16 at {config.audio.rate} Hz"),
        "input_audio_noise_reduction": _written_noise(config),
        "input_audio_transcription": _written_transcription(config.live),
        "turn_detection": _written_turns(config.live.turn_detection),
        "include": [LOGPROBS] if config.live.logprobs else None,
    }


def _written_format(form: AudioFormat) -> dict[str, Any]:
    if form.encoding == "pcm":
        return {"type": "audio/pcm", "rate": form.rate}
    return {"type": f"audio/{form.encoding}"}


def _written_noise(config: SessionConfig) -> dict[str, Any] | None:
    return None if config.noise_reduction is None else {"type": config.noise_reduction}


def _written_transcription(live: LiveConfig) -> dict[str, Any]:
    written: dict[str, Any] = {
        "model": live.model,
        "language": live.language,
        "prompt": live.prompt,
    }
    if live.languages:
        written["languages"] = list(live.languages)
    if live.keywords:
        written["keywords"] = list(live.keywords)
    if live.delay is not None:
        written["delay"] = live.delay
    return written


def _written_turns(detection: TurnDetection) -> dict[str, Any] | None:
    match detection:
        case ServerVad():
            return {
                "type": "server_vad",
                "threshold": detection.threshold,
                "prefix_padding_ms": detection.prefix_padding_ms,
                "silence_duration_ms": detection.silence_duration_ms,
                "idle_timeout_ms": detection.idle_timeout_ms,
            }
        case SemanticVad():
            return {"type": "semantic_vad", "eagerness": detection.eagerness}
        case None:
            return None

"""Applies a client's `session.update` to the session's configuration.

Both of OpenAI's shapes are read, in either event: the current one, nested under `audio.input`, and
the beta's flat one (`input_audio_format` ...). In both, a field that is left out keeps its value,
and null resets it to its default. Unknown fields are ignored, since many clients end at an error
about one. A value that a known field cannot have is refused.
Sources: https://developers.openai.com/api/docs/guides/realtime-transcription and openai-python's
`types/realtime`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast, get_args

from cluster.errors import InvalidRequestError, UnsupportedValueError
from router.live.interface import (
    Delay,
    Eagerness,
    LiveConfig,
    SemanticVad,
    ServerVad,
    TurnDetection,
)
from router.live.protocol.audio_format import AudioFormat
from router.live.protocol.field_values import (
    SHOWN,
    Sent,
    check_choice,
    integer,
    language_of,
    mapping,
    number,
    shown,
    text_of,
    texts_of,
)
from router.live.protocol.session_config import (
    BETA_FORMATS,
    LOGPROBS,
    PCM_24_KHZ,
    ModelNames,
    SessionConfig,
)

MIN_RATE, MAX_RATE = 8_000, 48_000
MAX_PROMPT = 10_000  # characters; Whisper reads the last 223 tokens
MAX_KEYWORDS = 256
MAX_KEYWORD = 200  # characters
MAX_SILENCE_MS = 60_000
NOISE_REDUCTIONS = ("near_field", "far_field")


def updated(config: SessionConfig, sent: object, names: ModelNames) -> SessionConfig:
    """The configuration that results from what a client sent.

    Raises:
        InvalidRequestError: a field has a value that it cannot have.
        ModelNotFoundError: there is no such model.
    """
    session = mapping(sent, "session")
    kind = session.get("type")
    if kind not in (None, "transcription"):
        raise UnsupportedValueError(
            f"Sessions of type {shown(kind)} are not served here; this server transcribes: send "
            f"'transcription'",
            param="session.type",
        )
    config = _read(config, session, _BETA, "session", names)
    if "audio" in session:
        sent_audio = session["audio"]
        audio = {"input": None} if sent_audio is None else mapping(sent_audio, "session.audio")
        if "input" in audio:
            here = "session.audio.input"
            fields = audio["input"]
            if fields is None:
                fields = dict.fromkeys(_INPUT)
            config = _read(config, mapping(fields, here), _INPUT, here, names)
    _check_languages(config.live, names)
    return _with_turn_detection_of_its_model(config, names)


def _check_languages(live: LiveConfig, names: ModelNames) -> None:
    known = names.languages(live.model)
    wanted = (*live.languages, *((live.language,) if live.language else ()))
    for code in wanted:
        if code not in known:
            raise UnsupportedValueError(
                f"The model '{live.model}' does not support the language '{code}'; it supports: "
                f"{', '.join(sorted(known))}",
                param="session.audio.input.transcription.language",
            )


def _with_turn_detection_of_its_model(config: SessionConfig, names: ModelNames) -> SessionConfig:
    if config.turn_detection_chosen:
        return config
    usual = None if config.live.model in names.without_vad else ServerVad()
    return replace(config, live=replace(config.live, turn_detection=usual))


# ---- readers: each takes the configuration, the value (None for null) and the field's name ----


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
    sent = mapping(sent, param)
    match sent.get("type", "audio/pcm"):
        case "audio/pcm":
            rate = sent.get("rate")
            rate = 24_000 if rate is None else integer(rate, f"{param}.rate", MIN_RATE, MAX_RATE)
            return replace(config, audio=AudioFormat("pcm", rate))
        case "audio/pcmu":
            return replace(config, audio=BETA_FORMATS["g711_ulaw"])
        case "audio/pcma":
            return replace(config, audio=BETA_FORMATS["g711_alaw"])
        case other:
            raise InvalidRequestError(
                f"The audio format {shown(other)} is not supported; send 'audio/pcm', "
                f"'audio/pcmu' or 'audio/pcma' (in beta sessions {', '.join(BETA_FORMATS)})",
                param=f"{param}.type",
                code="invalid_value",
            )


def _read_noise(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    kind = None if sent is None else mapping(sent, param).get("type")
    if kind is not None:
        check_choice(kind, f"{param}.type", NOISE_REDUCTIONS)
    return replace(config, noise_reduction=kind)


def _read_turns(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    detection: TurnDetection = None
    if sent is not None:
        sent = mapping(sent, param)
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
                check_choice(other, f"{param}.type", ("server_vad", "semantic_vad"))
    return replace(
        config, live=replace(config.live, turn_detection=detection), turn_detection_chosen=True
    )


def _server_vad(vad: ServerVad, sent: Sent, param: str) -> ServerVad:
    usual = ServerVad()
    if "threshold" in sent:
        value = sent["threshold"]
        if value is not None:
            value = number(value, f"{param}.threshold", 0.0, 1.0)
        vad = replace(vad, threshold=usual.threshold if value is None else value)
    for name in ("prefix_padding_ms", "silence_duration_ms", "idle_timeout_ms"):
        if name in sent:
            value = sent[name]
            if value is not None:
                value = integer(value, f"{param}.{name}", 0, MAX_SILENCE_MS)
            vad = replace(vad, **{name: getattr(usual, name) if value is None else value})
    return vad


def _semantic_vad(vad: SemanticVad, sent: Sent, param: str) -> SemanticVad:
    if "eagerness" not in sent:
        return vad
    eagerness = sent["eagerness"]
    if eagerness is None:
        return SemanticVad()
    check_choice(eagerness, f"{param}.eagerness", get_args(Eagerness))
    return SemanticVad(cast(Eagerness, eagerness))


def _read_transcription(
    config: SessionConfig, sent: Any, param: str, names: ModelNames
) -> SessionConfig:
    fields = dict.fromkeys(_TRANSCRIPTION) if sent is None else mapping(sent, param)
    return _read(config, fields, _TRANSCRIPTION, param, names)


def _read_model(config: SessionConfig, sent: Any, param: str, names: ModelNames) -> SessionConfig:
    if sent is None:
        return config  # a session always has a model
    names.languages(text_of(sent, param, 4 * SHOWN))
    return replace(config, live=replace(config.live, model=sent))


def _read_language(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    # Clients send an empty text if their user has chosen no language.
    code = None if sent in (None, "", "auto") else language_of(sent, param)
    return replace(config, live=replace(config.live, language=code))


def _read_languages(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    sent = texts_of(sent, param, 100, SHOWN)
    codes = tuple(language_of(one, f"{param}[{i}]") for i, one in enumerate(sent))
    return replace(config, live=replace(config.live, languages=codes))


def _read_prompt(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    prompt = "" if sent is None else text_of(sent, param, MAX_PROMPT)
    return replace(config, live=replace(config.live, prompt=prompt))


def _read_keywords(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    keywords = texts_of(sent, param, MAX_KEYWORDS, MAX_KEYWORD)
    return replace(config, live=replace(config.live, keywords=keywords))


def _read_delay(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    if sent is not None:
        check_choice(sent, param, get_args(Delay))
    return replace(config, live=replace(config.live, delay=cast("Delay | None", sent)))


def _read_include(config: SessionConfig, sent: Any, param: str, _: ModelNames) -> SessionConfig:
    wanted = LOGPROBS in texts_of(sent, param, 64, 256)
    return replace(config, live=replace(config.live, logprobs=wanted))


# The model comes first, since other fields may depend on it.
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

"""The configuration of a realtime session, the model names that it may use, and how it is written.

`router.live.protocol.session_updates` reads it from a client's update. It is written in the shape
of the current protocol and in the beta's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from router.live.interface import LiveConfig, ServerVad, TurnDetection
from router.live.protocol.audio_format import G711_RATE, AudioFormat

LOGPROBS = "item.input_audio_transcription.logprobs"

PCM_24_KHZ = AudioFormat()
BETA_FORMATS = {
    "pcm16": PCM_24_KHZ,
    "g711_ulaw": AudioFormat("pcmu", G711_RATE),
    "g711_alaw": AudioFormat("pcma", G711_RATE),
}


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """The configuration of a session.

    audio: the format of the client's audio.
    noise_reduction: kept and repeated to the client. No noise is reduced, since Whisper was trained
        on noisy audio.
    live: the configuration that the engine gets.
    turn_detection_chosen: whether the client has chosen how turns end; until then the name of its
        model decides.
    """

    audio: AudioFormat = PCM_24_KHZ
    noise_reduction: str | None = None
    live: LiveConfig = field(default_factory=LiveConfig)
    turn_detection_chosen: bool = False


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What a session has to know of model names.

    languages: codes of the languages of the model of this name; raises ModelNotFoundError.
    are_one: whether two names mean the same model.
    without_vad: the names whose clients end turns by commits, unless they choose otherwise.
    """

    languages: Callable[[str], Collection[str]]
    are_one: Callable[[str, str], bool]
    without_vad: Collection[str] = ()


def as_session(config: SessionConfig, session_id: str, expires_at: int) -> dict[str, Any]:
    """The session object in the current protocol's shape."""
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
    always = {"model": live.model, "language": live.language, "prompt": live.prompt}
    sometimes = {
        "languages": list(live.languages),
        "keywords": list(live.keywords),
        "delay": live.delay,
    }
    return always | {name: value for name, value in sometimes.items() if value}


def _written_turns(detection: TurnDetection) -> dict[str, Any] | None:
    if detection is None:
        return None
    kind = "server_vad" if isinstance(detection, ServerVad) else "semantic_vad"
    return {"type": kind, **asdict(detection)}

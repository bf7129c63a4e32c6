"""Writes the session object of answers, in the current protocol's shape and in the beta's."""

from __future__ import annotations

from typing import Any

from router.live.interface import LiveConfig, SemanticVad, ServerVad, TurnDetection
from router.live.protocol.audio_format import AudioFormat
from router.live.protocol.session_config import BETA_FORMATS, LOGPROBS, SessionConfig


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

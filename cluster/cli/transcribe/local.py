"""The server that a command starts in this process for its own requests.

It has no limits on audio and time, and ignores those that the environment sets for routers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.cli.transcribe.job import Target
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Settings
from cluster.common.settings_sources import ENV_PREFIX, load_settings
from router.api.forms import check_model
from router.api.params import TranscriptionParams
from router.audio.protocol import AudioLimits

OF_ROUTERS = f"{ENV_PREFIX}ROUTER__"
NO_LIMIT_S = 7 * 24 * 3600.0
NO_LIMITS = {
    "max_upload_bytes": 2**50,
    "max_audio_s": NO_LIMIT_S,
    "min_audio_s": 0.0,
    "max_pending_audio_s": 1000 * NO_LIMIT_S,
    "stall_timeout_s": NO_LIMIT_S,
    "audio_timeout_s": 4 * 3600.0,  # for a decoder that hangs
    "live": dict.fromkeys(("max_session_s", "idle_timeout_s", "max_unsent_s"), NO_LIMIT_S),
}
QUIET = ("uvicorn.error", "router.http")  # loggers: the command reports the same errors


@asynccontextmanager
async def own_server(params: TranscriptionParams, target: Target) -> AsyncIterator[Target]:
    """Serve the model of `params`; yields `target` with this server and its key.

    Raises ConfigurationError, or UnsupportedValueError: the model cannot do what `params` say.
    """
    await asyncio.to_thread(_check, params)
    from cluster.serve.in_process import local_server  # imports torch

    for name in QUIET:
        logging.getLogger(name).addHandler(logging.NullHandler())
    key = secrets.token_urlsafe()
    async with local_server(local_settings(params.model, target, key)) as url:
        yield replace(target, server=url, api_key=key, is_own=True)


def declared_s(audio: Path) -> float | None:
    """Seconds that the container states, if any. Raises InvalidAudioError or OSError."""
    from router.audio.audio_file import AudioFile  # imports libav

    limits = AudioLimits(2**50, NO_LIMIT_S, 0.0, NO_LIMIT_S, 2**50)
    file = AudioFile(audio, limits)
    file.close()
    return file.declared_s


def _check(params: TranscriptionParams) -> None:
    """Refuse a wrong model or request before torch is imported."""
    checkpoint = open_checkpoint(params.model)
    check_model(params, WhisperTokenizer.from_checkpoint(checkpoint).languages)


def local_settings(model: str, target: Target, key: str) -> Settings:
    role: dict[str, Any] = {
        "device": target.device,
        "threads": target.threads,
        "dtype": target.dtype,
    }
    router = {**NO_LIMITS, "api_key": key}
    flags = {"model": model, "router": router, "encoder": role, "decoder": role}
    environ = {name: text for name, text in os.environ.items() if not name.startswith(OF_ROUTERS)}
    return load_settings(None, flags, environ)

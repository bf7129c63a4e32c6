"""The same samples through splitscribe and through openai-whisper, both in float32, in process."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import whisper

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import Pcm
from cluster.common.settings_sources import load_settings
from cluster.serve.in_process import local_transcriber
from router.api.params import TranscriptionParams
from router.interface import TranscriptionResult
from router.transcriber import RequestTranscriber
from tests.support.references.openai_whisper import (
    openai_model,
    openai_vocabulary,
    reference_options,
)
from tests.support.requests import request_context

NO_DEADLINE_S = 24 * 3600.0


@asynccontextmanager
async def float32_transcriber(
    model: str = "demo", threads: int = 1, context: str = "full"
) -> AsyncIterator[RequestTranscriber]:
    """threads: of each role, 0 takes every core. context: "full" as the references have it."""
    role = {"dtype": "float32", "device": "cpu", "threads": threads}
    settings = {
        "model": model,
        "router": {"audio_workers": 1},
        "encoder": {**role, "context": context},
        "decoder": role,
    }
    async with local_transcriber(load_settings(None, settings, environ={})) as transcriber:
        yield transcriber


async def ours(
    transcriber: RequestTranscriber, params: TranscriptionParams, pcm: Pcm, folder: Path
) -> TranscriptionResult:
    file = folder / f"{uuid.uuid4()}.wav"
    file.write_bytes(wav_bytes(pcm))
    try:
        return await transcriber.transcribe(file, params, request_context(seconds=NO_DEADLINE_S))
    finally:
        file.unlink()


def answer_of(checkpoint: Path, pcm: Pcm, **options: Any) -> dict[str, Any]:
    options = reference_options(checkpoint) | options
    with openai_vocabulary(checkpoint):
        answer: dict[str, Any] = whisper.transcribe(
            openai_model(checkpoint), pcm.astype(np.float32) / 32_768, **options
        )
    return answer


def theirs(checkpoint: Path, pcm: Pcm) -> str:
    torch.manual_seed(0)  # of its sampling above temperature 0
    return str(answer_of(checkpoint, pcm)["text"]).strip()

"""Transcription in this process, with both roles on one device and no limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cluster.cli.transcribe.job import Job, LiveJob, Target, TranscribeFile, Watcher
from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from router.api.formats import render
from router.api.forms import check_model, parse_alignment
from router.api.params import TranscriptionParams
from router.audio.protocol import AudioLimits
from router.interface import RequestContext
from router.live.interface import LiveEvent
from router.live.session import LiveSession
from router.transcript import Transcript

NO_DEADLINE_S = 7 * 24 * 3600.0
NO_LIMITS = {
    "max_upload_bytes": 2**50,
    "max_audio_s": NO_DEADLINE_S,
    "min_audio_s": 0.0,
    "audio_timeout_s": 4 * 3600.0,  # for a decoder that hangs
}


@asynccontextmanager
async def in_process(job: Job) -> AsyncIterator[TranscribeFile]:
    """Raises ConfigurationError, or UnsupportedValueError: the model cannot do this."""
    params = job.params
    await _check(params)
    from cluster.serve.in_process import local_transcriber

    async with local_transcriber(local_settings(params.model, job.target)) as transcriber:

        async def transcribe_one(file: Path, watcher: Watcher) -> Transcript:
            context = RequestContext.unlimited(file.name, NO_DEADLINE_S)
            context.on_progress = watcher.progress
            context.on_update = lambda update: watcher.segments(update.segments)
            return (await transcriber.transcribe(file, params, context)).transcript

        yield transcribe_one


def check_audio(audio: Path) -> None:
    """Open a file before a model is loaded. Raises InvalidAudioError or OSError."""
    from router.audio.audio_file import AudioFile  # imports libav

    limits = AudioLimits(2**50, NO_DEADLINE_S, 0.0, NO_DEADLINE_S, 2**50)
    AudioFile(audio, limits).close()


async def align_in_process(
    audio: Path, model: str, form: Mapping[str, str], target: Target
) -> bytes:
    """Return the response body of the alignment endpoint. Raises as `in_process`."""
    from cluster.serve.in_process import local_transcriber  # imports torch

    async with local_transcriber(local_settings(model, target)) as transcriber:
        fields = {"model": model, **form}
        params = parse_alignment(fields.items(), transcriber.tokenizer.languages)
        context = RequestContext.unlimited(audio.name, NO_DEADLINE_S)
        result = await transcriber.transcribe(audio, params, context)
        return render(result.transcript, params)[0]


@asynccontextmanager
async def live_in_process(job: LiveJob) -> AsyncIterator[LocalLiveClient]:
    """Raises as `in_process`."""
    await _check(TranscriptionParams(job.config.model, language=job.config.language))
    from cluster.serve.in_process import live_engine_over, local_engines

    async with (
        local_engines(local_settings(job.config.model, job.target)) as engines,
        live_engine_over(engines) as live,
    ):
        yield LocalLiveClient(live.open(job.config, session_id="live"))


async def _check(params: TranscriptionParams) -> None:
    """Refuse a wrong model or request before torch is imported."""
    checkpoint = await asyncio.to_thread(open_checkpoint, params.model)
    check_model(params, WhisperTokenizer.from_checkpoint(checkpoint).languages)


class LocalLiveClient:
    rate = SAMPLE_RATE

    def __init__(self, session: LiveSession) -> None:
        self._session = session

    @property
    def unsent_s(self) -> float:
        return self._session.unsent_s

    async def append(self, pcm: Pcm) -> None:
        self._session.append(pcm)

    async def end(self) -> None:
        await self._session.drain()

    def events(self) -> AsyncIterator[LiveEvent]:
        return self._session.events()


def local_settings(model: str, target: Target) -> Settings:
    role: dict[str, Any] = {
        "device": target.device,
        "threads": target.threads,
        "dtype": target.dtype,
    }
    flags = {"model": model, "router": NO_LIMITS, "encoder": role, "decoder": role}
    return load_settings(None, flags)

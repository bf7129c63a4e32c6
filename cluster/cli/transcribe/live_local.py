"""A live session of this process: both roles on one device, KV moved in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.cli.transcribe.job import LiveJob
from cluster.cli.transcribe.live_client import Said
from cluster.cli.transcribe.local import local_settings
from cluster.messages import SAMPLE_RATE, Pcm
from cluster.model.text.tokenizer import WhisperTokenizer
from router.live.interface import LiveConfig, LiveSession, TextDelta, TurnCompleted, TurnFailed


@asynccontextmanager
async def in_process(job: LiveJob) -> AsyncIterator[LocalLiveClient]:
    """Load the model and begin a session.

    Raises:
        ConfigurationError: settings or checkpoint do not fit.
        UnsupportedValueError: the model does not know the language.
    """
    from cluster.serve.in_process import live_engine_over, local_engines  # imports torch

    config = LiveConfig(
        model=job.model, language=job.language, prompt=job.prompt, keywords=job.keywords
    )
    async with (
        local_engines(local_settings(job.model, job.target)) as engines,
        live_engine_over(engines) as live,
    ):
        if job.language is not None:
            tokenizer = WhisperTokenizer.from_checkpoint(engines.checkpoint)
            tokenizer.sot_sequence(job.language, "transcribe", True)  # raises
        yield LocalLiveClient(live.open(config, session_id="live"))


class LocalLiveClient:
    """Implements `LiveClient`."""

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

    async def said(self) -> AsyncIterator[Said]:
        async for event in self._session.events():
            match event:
                case TextDelta():
                    yield Said(event.text)
                case TurnCompleted():
                    yield Said(ends_turn=True)
                case TurnFailed():
                    yield Said(ends_turn=True, error=str(event.error))

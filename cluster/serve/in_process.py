"""One model's roles, router and HTTP server in this process, on one device and without Ray.

KV moves in memory. For the commands that need no cluster, and for tests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.types import ASGIApp

from cluster.common.errors import ConfigurationError
from cluster.common.kv.connect import make_exporter, make_importer, make_kv_pool
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.pool import gpu_budget
from cluster.common.messages import Role, WorkerStatus
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.device import resolve_device
from cluster.common.settings import Settings, Transport
from cluster.serve.model_parts import make_live_engine, make_transcriber, served_model
from cluster.serve.replicas.workers import EXPORT_PORTION
from decoder_worker import build as decoder_build
from decoder_worker.engine import DecoderEngine
from encoder_worker import sizing as encoder_sizing
from encoder_worker.engine import EncoderEngine
from router.audio.pool import AudioPool
from router.http.listener import HttpListener
from router.http.models import ModelRegistry
from router.http.routes import create_app
from router.live.activity import VoiceActivity
from router.pools import EnginePool
from router.transcriber import RequestTranscriber

_T = TypeVar("_T")


def sized_together(settings: Settings, checkpoint: Checkpoint, device: str) -> Settings:
    budget = gpu_budget(device)
    settings = encoder_sizing.sized(settings, checkpoint, device, budget, EXPORT_PORTION)
    if budget is not None:
        budget = budget.less(encoder_sizing.taken_bytes(settings, checkpoint, device))
    return decoder_build.sized(settings, checkpoint, device, budget)


def on_one_device(settings: Settings) -> Settings:
    """Resolve the device; a role with "auto" takes that of the other.

    Raises ConfigurationError: the roles' devices differ, or the device does not exist.
    """
    asked = {settings.encoder.device, settings.decoder.device} - {"auto"}
    if len(asked) > 1:
        raise ConfigurationError(
            f"one process has one device: encoder.device is {settings.encoder.device!r}, "
            f"decoder.device {settings.decoder.device!r}"
        )
    device = {"device": resolve_device(asked.pop() if asked else "auto")}
    return settings.model_copy(
        update={
            "encoder": settings.encoder.model_copy(update=device),
            "decoder": settings.decoder.model_copy(update=device),
        }
    )


@dataclass(frozen=True, slots=True)
class LocalEngines:
    checkpoint: Checkpoint
    settings: Settings
    encoder: EncoderEngine
    decoder: DecoderEngine
    importer: KVImporter

    def pool(self, role: Role) -> EnginePool:
        engine = self.encoder if role == "encoder" else self.decoder

        def status() -> WorkerStatus:
            return engine.stats().as_status(
                replica=f"local-{os.getpid()}",
                model=self.checkpoint.name,
                transport=self.importer.transport,
                device=self.settings.encoder.device,
                healthy=engine.healthy() is None,
            )

        return EnginePool(engine.submit, status)


@asynccontextmanager
async def local_engines(
    settings: Settings, transport: Transport = "memory"
) -> AsyncIterator[LocalEngines]:
    checkpoint = await asyncio.to_thread(open_checkpoint, settings.model)
    settings = on_one_device(settings)
    device = settings.encoder.device
    settings = sized_together(settings, checkpoint, device)
    own = settings.model_copy(update={"transport": transport, "cluster_key": os.urandom(32).hex()})
    # Each part is closed after those that use it, also if a later one fails to start.
    async with AsyncExitStack() as started:
        exporter = await _made(started, make_exporter, checkpoint, own, device, "encoder")
        importer = await _made(started, make_importer, checkpoint, own, device, "decoder")
        encoder = await _made(started, EncoderEngine, checkpoint, exporter, settings.encoder)
        kv_pool = make_kv_pool(checkpoint, own, device)
        decoder = await _made(
            started,
            partial(DecoderEngine, kv_pool=kv_pool),
            checkpoint,
            importer,
            settings.decoder,
        )
        yield LocalEngines(checkpoint, settings, encoder, decoder, importer)


async def _made(started: AsyncExitStack, make: Callable[..., _T], *args: Any) -> _T:
    """Make a part in a thread; `started` closes it, even if the caller is cancelled meanwhile."""
    making = asyncio.ensure_future(asyncio.to_thread(make, *args))

    async def close() -> None:
        await asyncio.wait([making])
        if making.exception() is None:
            part: Any = making.result()
            await asyncio.to_thread(part.close)

    started.push_async_callback(close)
    return await asyncio.shield(making)


@asynccontextmanager
async def local_transcriber(settings: Settings) -> AsyncIterator[RequestTranscriber]:
    async with local_engines(settings) as engines, transcriber_over(engines) as transcriber:
        yield transcriber


@asynccontextmanager
async def transcriber_over(engines: LocalEngines) -> AsyncIterator[RequestTranscriber]:
    audio = AudioPool(engines.settings.router, speakers=engines.settings.speaker_network())
    await audio.start()
    try:
        yield make_transcriber(
            engines.settings,
            engines.checkpoint,
            audio,
            engines.pool("encoder"),
            engines.pool("decoder"),
        )
    finally:
        await audio.close()


@asynccontextmanager
async def local_server(settings: Settings) -> AsyncIterator[str]:
    """Serve one model on a free port of this machine; yields the URL. Raises as `local_engines`."""
    async with (
        local_registry(settings) as registry,
        listening(create_app(registry, settings.router), settings) as url,
    ):
        yield url


@asynccontextmanager
async def local_registry(settings: Settings) -> AsyncIterator[ModelRegistry]:
    name, own = next(iter(settings.by_model().items()))
    async with (
        local_engines(own) as engines,
        transcriber_over(engines) as transcriber,
        AsyncExitStack() as closed,
    ):
        activity = VoiceActivity()
        closed.push_async_callback(activity.close)
        encoder, decoder = engines.pool("encoder"), engines.pool("decoder")
        recorder = silent_recorder(ROUTER_METRICS)
        live = make_live_engine(
            engines.settings, engines.checkpoint, encoder, decoder, activity, recorder
        )
        closed.push_async_callback(live.close)
        yield ModelRegistry([served_model(settings, name, transcriber, live)])


@asynccontextmanager
async def listening(app: ASGIApp, settings: Settings) -> AsyncIterator[str]:
    """Raises ConfigurationError: this machine has no loopback address to listen on."""
    longest = settings.router.live.max_event_bytes
    try:
        listener = await HttpListener.open(app, "127.0.0.1", 0, longest)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on 127.0.0.1: {error.strerror}") from error
    try:
        yield f"http://127.0.0.1:{listener.port}"
    finally:
        await listener.close()

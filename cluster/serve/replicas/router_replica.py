"""The router's Serve replica: the HTTP application over handles to the pools of every model.

It listens itself, or it is an ingress behind Serve's proxy, which calls `__serve_build_asgi_app__`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from fastapi import FastAPI

from cluster.common.errors import ConfigurationError
from cluster.common.messages import ROLES
from cluster.common.metrics import ROUTER_METRICS, Recorder
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import RouterSettings, Settings
from cluster.common.tracing import NO_TRACER, Tracer, make_tracer
from cluster.serve.batch_client import batches_behind
from cluster.serve.model_parts import make_live_engine, make_transcriber, served_model
from cluster.serve.ray_internals import replica_is_stopping
from cluster.serve.replicas.replica_setup import start_replica
from cluster.serve.serve_pool import pools_of
from router.audio.pool import AudioPool
from router.http.batches import BatchAccess
from router.http.listener import HttpListener
from router.http.models import ModelRegistry
from router.http.routes import create_app
from router.live.activity import VoiceActivity

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2


class Router:
    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: Settings,
        build: str,
        encoders: Mapping[str, Any],
        decoders: Mapping[str, Any],
        batches: Any = None,
    ) -> None:
        """encoders, decoders: by the names of `settings.by_model()`. batches: the batch owner's."""
        self._opened = AsyncExitStack()  # closed by `__del__`, also if a later step here fails
        replica, recorder = start_replica("router", settings, build, ROUTER_METRICS)
        self._settings, self._build = settings, build
        tracer = make_tracer(settings, "router", replica)
        self._opened.push_async_callback(asyncio.to_thread, tracer.close)
        audio = AudioPool(settings.router, speakers=settings.speaker_network())
        self._opened.push_async_callback(audio.close)
        await audio.start()
        activity = VoiceActivity()
        self._opened.push_async_callback(activity.close)
        models, pools = [], pools_of(encoders, decoders)
        for name, own in settings.by_model().items():
            checkpoint = await asyncio.to_thread(open_checkpoint, own.model, weights=False)
            encoder, decoder = pools[name]
            may_sleep = [role for role in ROLES if getattr(own, role).fewest == 0]
            transcriber = make_transcriber(
                own,
                checkpoint,
                audio,
                encoder,
                decoder,
                recorder,
                tracer=tracer,
                may_sleep=may_sleep,
            )
            live = make_live_engine(
                own, checkpoint, encoder, decoder, activity, recorder, tracer, audio=audio
            )
            self._opened.push_async_callback(live.close)
            models.append(served_model(settings, name, transcriber, live))
            logger.info("ready: model %s as %s", checkpoint.name, name)
        registry = ModelRegistry(
            models,
            openai_aliases=settings.router.openai_aliases,
            list_openai_aliases=settings.router.list_openai_aliases,
        )
        self._app = router_app(registry, settings, recorder, tracer, batches)
        self._listener = await open_listener(self._app, settings.router)
        if self._listener is None:
            draining = asyncio.create_task(self._drain_when_stopped())
            self._opened.callback(draining.cancel)
        else:
            self._opened.push_async_callback(self._listener.close)
            self._opened.push_async_callback(self._app.state.realtime.drain)

    def check_health(self) -> None:
        if self._listener is not None:
            self._listener.check()

    async def shared_settings(self) -> tuple[Settings, str]:
        return without_secrets(self._settings), self._build

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def _drain_when_stopped(self) -> None:
        """End live sessions, which are requests that Serve's proxy would wait for."""
        while not replica_is_stopping():  # noqa: ASYNC110 - Serve has no event for it
            await asyncio.sleep(STOP_POLL_S)
        await self._app.state.realtime.drain()

    async def __del__(self) -> None:
        await self._opened.aclose()


def without_secrets(settings: Settings) -> Settings:
    router = settings.router.model_copy(update={"api_key": (), "api_key_file": None})
    batches = settings.batches.model_copy(update={"webhook_secret": None})
    return settings.model_copy(update={"cluster_key": None, "router": router, "batches": batches})


def router_app(
    registry: ModelRegistry,
    settings: Settings,
    recorder: Recorder,
    tracer: Tracer = NO_TRACER,
    batches: Any = None,
) -> FastAPI:
    access = None
    if batches is not None:
        access = BatchAccess(batches_behind(batches), settings.batches.max_file_bytes)
    return create_app(
        registry,
        settings.router,
        recorder=recorder,
        tracer=tracer,
        echo_request_id=settings.router.listener == "router",  # Serve's proxy names requests itself
        cluster_key=settings.cluster_key,
        batches=access,
    )


async def open_listener(app: FastAPI, settings: RouterSettings) -> HttpListener | None:
    """Returns None if Serve's proxy listens. Raises ConfigurationError: the port is taken."""
    if settings.listener != "router":
        return None
    try:
        return await HttpListener.open(
            app, settings.host, settings.port, settings.live.max_event_bytes
        )
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        ) from error

"""The router's Serve replica: FastAPI in front, handles to the pools of every model behind.

Builds the parts and wires them; all behaviour is in them. Either the replica listens itself, or it
is an ingress behind Serve's proxy: `__serve_build_asgi_app__` is Serve's hook for an application
that is made inside the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from cluster.common.errors import ConfigurationError
from cluster.common.messages import ROLES
from cluster.common.metrics import ROUTER_METRICS, Recorder
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import RouterSettings, Settings
from cluster.common.tracing import NO_TRACER, Tracer, make_tracer
from cluster.serve.batch_client import batches_behind
from cluster.serve.model_parts import (
    make_first_window,
    make_live_engine,
    make_transcriber,
    served_model,
)
from cluster.serve.own_calls import OWN_CALLS
from cluster.serve.ray_internals import replica_is_stopping
from cluster.serve.replicas.replica_setup import start_replica
from cluster.serve.serve_pool import ServePool
from router.audio.pool import AudioPool
from router.http.batches import BatchAccess
from router.http.listener import HttpListener
from router.http.models import ModelRegistry
from router.http.routes import create_app
from router.live.activity import VoiceActivity
from router.live.session import LiveSessions
from router.warm_up import WarmUp

logger = logging.getLogger(__name__)

STOP_POLL_S = 0.2


class Router:
    """Serve deployment class of the HTTP front."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: Settings,
        build: str,
        encoders: Mapping[str, Any],
        decoders: Mapping[str, Any],
        batches: Any = None,
    ) -> None:
        """The handles that it needs.

        Args:
            encoders, decoders: by the names of `settings.by_model()`.
            batches: of the owner of files and batches; None: there is none.
        """
        replica, recorder = start_replica("router", settings, build, ROUTER_METRICS)
        self._recorder = recorder
        self._tracer = make_tracer(settings, "router", replica)
        self._settings, self._build = settings, build
        self._audio = AudioPool(settings.router)
        await self._audio.start()
        self._activity = VoiceActivity()
        self._live: list[LiveSessions] = []
        self._warm_up = WarmUp()
        models, first_windows = [], []
        for name, own in settings.by_model().items():
            checkpoint = await asyncio.to_thread(open_checkpoint, own.model, weights=False)
            encoder = ServePool(encoders[name], "encoder", OWN_CALLS)
            decoder = ServePool(decoders[name], "decoder", OWN_CALLS)
            may_sleep = [role for role in ROLES if getattr(own, role).fewest == 0]
            transcriber = make_transcriber(
                own,
                checkpoint,
                self._audio,
                encoder,
                decoder,
                recorder,
                tracer=self._tracer,
                may_sleep=may_sleep,
            )
            if not may_sleep:  # a window would wake it
                tokenizer = transcriber.tokenizer
                first_windows.append(
                    make_first_window(own, checkpoint, encoder, decoder, tokenizer)
                )
            live = make_live_engine(
                own, checkpoint, encoder, decoder, self._activity, recorder, self._tracer
            )
            self._live.append(live)
            models.append(served_model(settings, name, transcriber, live))
            logger.info("ready: model %s as %s", checkpoint.name, name)
        self._registry = ModelRegistry(
            models,
            openai_aliases=settings.router.openai_aliases,
            list_openai_aliases=settings.router.list_openai_aliases,
            is_held=self._warm_up.holds,
        )
        self._app = router_app(self._registry, settings, recorder, self._tracer, batches)
        self._listener = await open_listener(self._app, settings.router)
        self._warm_up.begin(first_windows)
        if self._listener is None:
            self._draining = asyncio.create_task(self._drain_when_stopped())

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if self._listener is not None:
            self._listener.check()

    async def shared_settings(self) -> tuple[Settings, str]:
        """What bulk work needs to know of this application: its settings, and its build."""
        return without_secrets(self._settings), self._build

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def _drain_when_stopped(self) -> None:
        """Behind Serve's proxy a session counts as a request, for whose end a stop waits."""
        while not replica_is_stopping():  # noqa: ASYNC110 - Serve has no event for it
            await asyncio.sleep(STOP_POLL_S)
        await self._app.state.realtime.drain()

    async def __del__(self) -> None:
        """Serve's hook on shutdown."""
        if hasattr(self, "_draining"):
            self._draining.cancel()
        if hasattr(self, "_warm_up"):
            self._warm_up.close()
        if hasattr(self, "_listener") and self._listener is not None:
            await self._app.state.realtime.drain()
            await self._listener.close()
        for live in getattr(self, "_live", ()):
            await live.close()
        if hasattr(self, "_activity"):
            await self._activity.close()
        if hasattr(self, "_audio"):
            await self._audio.close()
        if hasattr(self, "_tracer"):
            await asyncio.to_thread(self._tracer.close)


def without_secrets(settings: Settings) -> Settings:
    """`settings` without API keys and the keys that sign, which only replicas know."""
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
    """The application of one replica, for its own listener or for Serve's proxy.

    batches: handle of the owner of files and batches; None: there is none.
    """
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
    """Serve HTTP from this replica; None where Serve's proxy does.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
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

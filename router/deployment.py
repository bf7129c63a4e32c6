"""The router's Serve replica: FastAPI in front, handles to the pools of every model behind.

Builds the parts and wires them; all behaviour is in them. `__serve_build_asgi_app__` is Serve's
hook for an application that is made inside the replica.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from cluster.metrics import ROUTER_METRICS
from cluster.model.checkpoint import open_checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from cluster.replica import start_replica
from cluster.settings import Settings
from router.audio import AudioPool
from router.clients import ServePool
from router.models import ModelRegistry, ServedModel
from router.pipeline import TranscriptionPipeline
from router.routes import create_app

logger = logging.getLogger(__name__)


class Router:
    """Serve deployment class of the HTTP front."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: Settings,
        build: str,
        encoders: Mapping[str, Any],
        decoders: Mapping[str, Any],
    ) -> None:
        """`encoders`, `decoders`: handles by the names of `settings.by_model()`."""
        _, recorder = start_replica("router", settings, build, ROUTER_METRICS)
        self._settings = settings
        self._audio = AudioPool(settings.router)
        await self._audio.start()
        models = []
        for name, own in settings.by_model().items():
            checkpoint = await asyncio.to_thread(open_checkpoint, own.model, weights=False)
            pipeline = TranscriptionPipeline(
                self._audio,
                ServePool(encoders[name], "encoder"),
                ServePool(decoders[name], "decoder"),
                WhisperTokenizer.from_checkpoint(checkpoint),
                settings.router,
                recorder,
                dims=checkpoint.dims,
            )
            models.append(served_model(settings, name, pipeline))
            logger.info("ready: model %s as %s", checkpoint.name, name)
        self._registry = ModelRegistry(models)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._registry, self._settings.router, echo_request_id=False)

    async def __del__(self) -> None:
        if hasattr(self, "_audio"):
            await self._audio.close()


def served_model(settings: Settings, name: str, pipeline: TranscriptionPipeline) -> ServedModel:
    """The model called `name` in `settings.by_model()`: what clients may call it, and more."""
    return ServedModel(
        names=settings.by_model()[name].served_model_names,
        languages=pipeline.tokenizer.languages,
        pipeline=pipeline,
        aliases=settings.aliases_of(name),
    )

"""The router's Serve replica: FastAPI in front, handles to both pools behind.

Builds the parts and wires them; all behaviour is in them. `__serve_build_asgi_app__` is Serve's
hook for an application that is made inside the replica.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from cluster.metrics import ROUTER_METRICS
from cluster.model.checkpoint import open_checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from cluster.replica import start_replica
from cluster.settings import Settings
from router.audio import AudioPool
from router.clients import ServePool
from router.models import ServedModel
from router.pipeline import TranscriptionPipeline
from router.routes import create_app

logger = logging.getLogger(__name__)


class Router:
    """Serve deployment class of the HTTP front."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: Settings, build: str, encoders: Any, decoders: Any
    ) -> None:
        _, recorder = start_replica("router", settings, build, ROUTER_METRICS)
        self._settings = settings
        checkpoint = await asyncio.to_thread(open_checkpoint, settings.model, weights=False)
        tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self._audio = AudioPool(settings.router)
        await self._audio.start()
        self._pipeline = TranscriptionPipeline(
            self._audio,
            ServePool(encoders),
            ServePool(decoders),
            tokenizer,
            settings.router,
            recorder,
        )
        self._model = served_model(settings, tokenizer)
        logger.info("ready: model %s as %s", checkpoint.name, ", ".join(self._model.names))

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self._pipeline, self._settings.router, self._model, echo_request_id=False)

    async def __del__(self) -> None:
        if hasattr(self, "_audio"):
            await self._audio.close()


def served_model(settings: Settings, tokenizer: WhisperTokenizer) -> ServedModel:
    """What clients may call the model, and which languages it knows."""
    names = settings.served_model_names or (_default_name(settings.model),)
    return ServedModel(names=names, languages=tokenizer.languages)


def _default_name(model: str) -> str:
    """What a model is called when nobody named it: its Hub id, or its folder's name."""
    path = Path(model)
    return path.name if path.is_absolute() else model

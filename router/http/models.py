"""The names of a router's models, and the transcriber behind each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import unquote

from cluster.common.errors import ConfigurationError, ModelNotFoundError
from cluster.common.messages import ROLES
from router.api.responses import ModelListResponse, ModelResponse
from router.interface import Progress, Transcriber
from router.live.session import LiveEngine

logger = logging.getLogger(__name__)

FRESH_S = 0.02  # longest wait of /health for the newest state of the pools
HEALTH_TIMEOUT_S = 5.0
ALIAS = "whisper-1"  # the hosted service's name, which many clients cannot change
# The hosted service's newer names. Clients of the live ones end turns themselves.
LIVE_ALIASES = ("gpt-realtime-whisper", "gpt-live-transcribe")
OPENAI_ALIASES = (
    "gpt-4o-transcribe",
    "gpt-4o-mini-transcribe",
    "gpt-4o-mini-transcribe-2025-12-15",
    "gpt-4o-transcribe-diarize",
    "gpt-transcribe",
    *LIVE_ALIASES,
)
PREFIX = "openai/"  # optional in front of every name
_SHOWN = 128  # characters of an unknown name that the message repeats


@dataclass(frozen=True, slots=True)
class ServedModel:
    names: tuple[str, ...]  # listed; the first is the main one
    languages: tuple[str, ...]  # codes
    transcriber: Transcriber
    aliases: tuple[str, ...] = ()  # more names, not listed
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time
    owned_by: str = "splitscribe"
    live: LiveEngine | None = None  # for realtime sessions; None: not supported
    progress: Progress = field(default_factory=Progress)
    description: str | None = None  # for clients


class ModelRegistry:
    """All models of a router. `whisper-1` is the model with that name or alias, else the first."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        openai_aliases: bool = True,
        list_openai_aliases: bool = False,
    ) -> None:
        """Raises ConfigurationError if there is no model or two share a name."""
        if not models:
            raise ConfigurationError("there is no model to serve")
        self.models = tuple(models)
        self._asking: asyncio.Task[None] | None = None
        self._known: dict[str, Any] = _UNKNOWN
        self._known_at_s: float | None = None
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in (*model.names, *model.aliases):
                if self._by_name.setdefault(name, model) is not model:
                    raise ConfigurationError(f"two models are called '{name}'")
        hosted = (ALIAS, *OPENAI_ALIASES) if openai_aliases else (ALIAS,)
        first = self._by_name.setdefault(ALIAS, models[0])
        for name in hosted:
            self._by_name.setdefault(name, first)
        self._listed_aliases = hosted if list_openai_aliases else ()

    def find(self, name: str) -> ServedModel:
        """`openai/` is optional, and `%2F` is read as a slash. Raises ModelNotFoundError."""
        plain = unquote(name)
        for spelling in (plain, plain.removeprefix(PREFIX), PREFIX + plain):
            if model := self._by_name.get(spelling):
                return model
        offered = ", ".join(f"'{known}'" for model in self.models for known in model.names)
        raise ModelNotFoundError(
            f"The model '{name[:_SHOWN]}' does not exist here; this server has: {offered}"
        )

    def describe(self, name: str) -> ModelResponse:
        model = self.find(name)
        return ModelResponse(
            id=unquote(name),
            created=model.created,
            owned_by=model.owned_by,
            description=model.description,
        )

    def listing(self) -> ModelListResponse:
        names = [name for model in self.models for name in model.names]
        names += [name for name in self._listed_aliases if name not in names]
        return ModelListResponse(data=[self.describe(name) for name in names])

    async def health(self) -> dict[str, Any]:
        """The state of the pools, `age_s` old if they do not answer within `FRESH_S`."""
        await asyncio.wait({self.look()}, timeout=FRESH_S)
        at_s = self._known_at_s
        return {**self._known, "age_s": at_s and round(time.monotonic() - at_s, 3)}

    def look(self) -> asyncio.Task[None]:
        """Ask the pools for their state, unless they are being asked."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        asked_at_s = time.monotonic()
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                self._known = await self._state()
        except Exception:  # /health must not fail
            logger.exception("the pools cannot be asked for their health")
            self._known = _UNKNOWN
        self._known_at_s = asked_at_s

    async def _state(self) -> dict[str, Any]:
        found = await asyncio.gather(*(model.transcriber.health() for model in self.models))
        for model, own in zip(self.models, found, strict=True):
            if not all(pool.replicas for pool in own.values()):
                model.progress.asleep_s = time.monotonic()
        ready = [all(pool.ready for pool in pools.values()) for pools in found]
        pools = {}
        for role in ROLES:
            of_role = [pools[role] for pools in found]
            pools[role] = {
                "ready": all(pool.ready for pool in of_role),
                "replicas": sum(pool.replicas for pool in of_role),
                "workers": [asdict(worker) for pool in of_role for worker in pool.workers],
            }
        models = {
            model.names[0]: {
                "status": _status(is_ready),
                "replicas": {role: pool.replicas for role, pool in own.items()},
            }
            for model, own, is_ready in zip(self.models, found, ready, strict=True)
        }
        return {"status": _status(all(ready)), "pools": pools, "models": models}


_UNKNOWN = {"status": "not ready", "pools": {}, "models": {}}


def _status(is_ready: bool) -> str:
    return "ready" if is_ready else "not ready"

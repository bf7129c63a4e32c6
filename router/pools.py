"""How the pipeline reaches the two pools: the protocols, and engines in the same process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from cluster.common.errors import WorkerDrainingError, WorkerError
from cluster.common.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    WorkerStatus,
)


class Room(NamedTuple):
    """How much work one process may have at a pool's workers at a time, in `WorkerLoad.work`."""

    workers: int = 1  # as far as this process knows
    each: float = math.inf  # for each of them

    @property
    def total(self) -> float:
        """0 without workers: then one window is sent all the same, and starts one."""
        return self.workers * self.each if self.workers else 0.0


class Pool(Protocol):
    async def status(self) -> list[WorkerStatus]: ...

    def room(self) -> Room: ...

    def has(self, kv_key: bytes) -> bool:
        """Whether a worker keeps this KV, or makes it, as far as this process knows."""


class EncoderClient(Pool, Protocol):
    async def encode(self, request: EncodeRequest) -> EncodeReply: ...


class DecoderClient(Pool, Protocol):
    async def decode(self, request: DecodeRequest) -> DecodeResult: ...


class Unbounded:
    """A pool that takes all at once, and orders it itself."""

    def room(self) -> Room:
        return Room()

    def has(self, kv_key: bytes) -> bool:
        return False


class EnginePool(Unbounded):
    """One engine in this process; implements both protocols through its `submit`.

    Once it takes nothing more, WorkerError says why: no other engine will come in its place.
    """

    def __init__(
        self, submit: Callable[[Any], Future[Any]], status: Callable[[], WorkerStatus]
    ) -> None:
        self._submit = submit
        self._status = status

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        reply: EncodeReply = await self._answer(request)
        return reply

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        result: DecodeResult = await self._answer(request)
        return result

    async def _answer(self, request: EncodeRequest | DecodeRequest) -> Any:
        try:
            return await asyncio.wrap_future(self._submit(request))
        except WorkerDrainingError as error:
            raise WorkerError(error.message) from error

    async def status(self) -> list[WorkerStatus]:
        return [self._status()]

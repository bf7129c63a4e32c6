"""Protocols by which the pipeline reaches both pools, and engines in the same process."""

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
    """Limit on the work that one process has at a pool at once, in `WorkerLoad.work`."""

    workers: int = 1  # known to this process
    each: float = math.inf  # work per worker

    @property
    def total(self) -> float:
        """0 without workers. One window is sent even then, which starts a worker."""
        return self.workers * self.each if self.workers else 0.0


class Pool(Protocol):
    async def status(self) -> list[WorkerStatus]: ...

    def room(self) -> Room: ...

    def has(self, kv_key: bytes) -> bool:
        """Whether this process knows of a worker that keeps or computes this KV."""


class EncoderClient(Pool, Protocol):
    async def encode(self, request: EncodeRequest) -> EncodeReply: ...


class DecoderClient(Pool, Protocol):
    async def decode(self, request: DecodeRequest) -> DecodeResult: ...


class Unbounded:
    """A pool without a limit, which orders its work itself."""

    def room(self) -> Room:
        return Room()

    def has(self, kv_key: bytes) -> bool:
        return False


class EnginePool(Unbounded):
    """One engine in this process. Draining becomes a WorkerError, since nothing replaces it."""

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

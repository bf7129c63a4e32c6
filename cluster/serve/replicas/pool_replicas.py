"""The replica classes of the pools: a worker of one role, or of both.

With both, each role keeps its engine, its thread and, on a GPU, its stream, of which the decoder's
has priority. KV moves in memory.
"""

from __future__ import annotations

import asyncio

from cluster.common.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    WorkerStatus,
)
from cluster.common.settings import Settings
from cluster.serve.replicas.replica_setup import start_replica
from cluster.serve.replicas.workers import EXPORT_PORTION, DecoderWorker, EncoderWorker


class EncoderReplica(EncoderWorker):
    async def __del__(self) -> None:
        await self.shut_down()


class DecoderReplica(DecoderWorker):
    async def __del__(self) -> None:
        await self.shut_down()


class ColocatedWorker:
    def __init__(self, settings: Settings, build: str) -> None:
        settings = settings.model_copy(update={"transport": "memory"})
        # In this order, as the decoder's pool gets the memory that the encoder leaves.
        self._encoder = EncoderWorker(settings, build, EXPORT_PORTION)
        self._decoder = DecoderWorker(settings, build)
        start_replica("worker", settings, build, ())  # from here on log lines name the worker

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        return await self._encoder.encode(request)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        return await self._decoder.decode(request)

    async def status(self) -> tuple[WorkerStatus, WorkerStatus]:
        return await self._encoder.status(), await self._decoder.status()

    def check_health(self) -> None:
        self._encoder.check_health()
        self._decoder.check_health()

    async def shut_down(self) -> None:
        """Drain both at once, as the encoder waits until the decoder has released its pages."""
        parts = (getattr(self, "_encoder", None), getattr(self, "_decoder", None))
        await asyncio.gather(*(part.shut_down() for part in parts if part is not None))


class ColocatedReplica(ColocatedWorker):
    async def __del__(self) -> None:
        await self.shut_down()

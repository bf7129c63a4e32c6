"""How the pipeline reaches the two pools: the protocols, and engines in the same process.

Through Ray Serve it is `cluster.serve.serve_pool.ServePool`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from cluster.common.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    OnToken,
    WorkerStatus,
)


class EncoderClient(Protocol):
    """The encoder pool, whichever of its workers answers."""

    async def encode(self, request: EncodeRequest) -> EncodeReply: ...

    async def status(self) -> list[WorkerStatus]: ...


class DecoderClient(Protocol):
    """The decoder pool, whichever of its workers answers."""

    async def decode(self, request: DecodeRequest, on_token: OnToken | None = None) -> DecodeResult:
        """Decode one window; `on_token` is called in the event loop, in order, before the end."""

    async def status(self) -> list[WorkerStatus]: ...


class EnginePool:
    """One engine in this process; implements both protocols through its `submit`."""

    def __init__(
        self, submit: Callable[..., Future[Any]], status: Callable[[], WorkerStatus]
    ) -> None:
        self._submit = submit
        self._status = status

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        reply: EncodeReply = await asyncio.wrap_future(self._submit(request))
        return reply

    async def decode(self, request: DecodeRequest, on_token: OnToken | None = None) -> DecodeResult:
        if on_token is None:
            submitted = self._submit(request)
        else:
            loop = asyncio.get_running_loop()
            submitted = self._submit(
                request, lambda token: loop.call_soon_threadsafe(on_token, token)
            )
        result: DecodeResult = await asyncio.wrap_future(submitted)
        return result

    async def status(self) -> list[WorkerStatus]:
        return [self._status()]

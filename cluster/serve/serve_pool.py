"""How a router reaches a pool of workers through Ray Serve.

The client turns Ray's failures into `WorkerGoneError` and unwraps our own errors, so that nothing
behind it needs to know Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

from cluster.errors import OverloadedError, SplitscribeError, WorkerGoneError
from cluster.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    OnToken,
    Role,
    WorkerStatus,
)
from cluster.serve.hooks.ledger import LARGE_POOLS
from cluster.serve.worker_choice import WorkLedger, kept_key, key_of

logger = logging.getLogger(__name__)

STATUS_TIMEOUT_S = 2.0
N_ASKED = 16  # workers of a large pool that /health asks and shows


class ServePool:
    """One pool behind a Serve deployment handle; implements both protocols.

    Its workers are of `role`, or of both roles; then each reports its status as either.
    """

    def __init__(self, handle: Any, role: Role, ledger: WorkLedger) -> None:
        """ledger: of this process, in which Serve's hook counts what it sends to each worker."""
        self._handle = handle
        self._role = role
        self._ledger = ledger
        # Made once: each costs as much as a small call.
        self._encode = handle.options(method_name="encode", request_serialization="pickle")
        self._decode = handle.options(method_name="decode", request_serialization="pickle")

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        key = self._begin(request)
        try:
            reply: EncodeReply = await call_worker(self._encode.remote(request))
            if reply.reused is not None:
                self._ledger.keep(key, kept_key(request))
            return reply
        finally:
            self._ledger.end(key)

    async def decode(self, request: DecodeRequest, on_token: OnToken | None = None) -> DecodeResult:
        key = self._begin(request)
        try:
            if on_token is not None:
                return await self._decode_streamed(request, on_token)
            result: DecodeResult = await call_worker(self._decode.remote(request))
            return result
        finally:
            self._ledger.end(key)

    def _begin(self, request: EncodeRequest | DecodeRequest) -> Hashable:
        """A call is in progress from now on, for the ledger; its key there."""
        key = key_of(request)
        self._ledger.begin(key)
        return key

    async def _decode_streamed(self, request: DecodeRequest, on_token: OnToken) -> DecodeResult:
        groups = self._handle.options(stream=True).decode_stream.remote(request)
        try:
            while True:
                group = await call_worker(groups.__anext__(), groups.cancel)
                if isinstance(group, DecodeResult):
                    return group
                for token in group:
                    on_token(token)
        except StopAsyncIteration:
            raise WorkerGoneError("a decoder ended its stream without a result") from None
        finally:
            groups.cancel()

    async def status(self) -> list[WorkerStatus]:
        """Ask every running replica, of a large pool `N_ASKED`; who does not answer is left out."""
        size = LARGE_POOLS.get(str(getattr(self._handle, "deployment_id", "")), 0)
        try:
            if size > N_ASKED:
                return await self._status_of_some(size)
            answers = await self._handle.broadcast("status").results_async(
                timeout_s=STATUS_TIMEOUT_S, return_exceptions=True
            )
        except Exception as error:  # a pool that cannot answer is reported, and is no failure
            logger.debug("the status of a pool cannot be had: %s", error)
            return []
        each = (answer if isinstance(answer, tuple) else (answer,) for answer in answers)
        return [
            status
            for statuses in each
            for status in statuses
            if isinstance(status, WorkerStatus) and status.role == self._role
        ]

    async def _status_of_some(self, size: int) -> list[WorkerStatus]:
        """Of workers at random: every router is asked for its health every few seconds."""
        calls = [self._handle.options(method_name="status").remote() for _ in range(N_ASKED)]
        asked = [asyncio.ensure_future(call_worker(call)) for call in calls]
        done, late = await asyncio.wait(asked, timeout=STATUS_TIMEOUT_S)
        for call in late:
            call.cancel()
        answers = [call.result() for call in done if call.exception() is None]
        return list(
            {
                answer.replica: replace(answer, of_workers=size)
                for answer in answers
                if isinstance(answer, WorkerStatus) and answer.role == self._role
            }.values()
        )


async def call_worker(response: Any, cancel: Callable[[], Any] | None = None) -> Any:
    """Await a Serve response; raise only errors of our own tree (and CancelledError).

    cancel: stops the call, where it is not the response's own `cancel` that does.

    Raises:
        SplitscribeError: as the worker raised it.
        WorkerGoneError: the replica died, was unreachable, or failed outside of our code.
        OverloadedError: Serve's own queue limit.
    """
    try:
        return await response
    except asyncio.CancelledError:
        (cancel or response.cancel)()
        raise
    except Exception as error:
        ours = _as_ours(error)
        if ours is error:
            raise
        raise ours from (None if isinstance(error, SplitscribeError) else error)


def _as_ours(error: Exception) -> Exception:
    """What a call of a worker raises where Serve raised this; the same where it is not Ray's.

    Ray is imported here, since only failures need it, and most calls have none.
    """
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(error, SplitscribeError):
        # Ray's dual class: hand on the plain one.
        cause = error.cause if isinstance(error, RayTaskError) else None
        return cause if isinstance(cause, SplitscribeError) else error
    if isinstance(error, BackPressureError):
        return OverloadedError("the workers' queues are full", retry_after_s=1.0)
    if isinstance(error, RayError | RayServeException):
        return WorkerGoneError(f"a worker failed: {type(error).__name__}: {error}")
    return error

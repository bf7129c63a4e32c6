"""A router's client of a pool of workers, through Ray Serve.

Ray's exceptions become those of `cluster.common.errors`, so that its callers need not know Ray.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from cluster.common.errors import (
    HandleRefusedError,
    KVLostError,
    OverloadedError,
    SequenceFailedError,
    SplitscribeError,
    WorkerDiedError,
    WorkerError,
    WorkerGoneError,
)
from cluster.common.messages import (
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    Role,
    WorkerLoad,
    WorkerStatus,
)
from cluster.serve.own_calls import OWN_CALLS, OwnCalls, key_of
from router.pools import Room

logger = logging.getLogger(__name__)

_R = TypeVar("_R", EncodeRequest, DecodeRequest)  # of either pool

# A process sends a worker two batches, so that the next one is there when the first is done, or as
# many windows as take this long.
BATCHES = 2.0
ROOM_S = 0.3
UNTOLD_ROOM = 4.0  # windows, until a worker has told its capacity
NEWEST = 0.2  # weight of the last answer, as workers may differ
STATUS_TIMEOUT_S = 2.0
N_ASKED = 16  # most workers of a pool that /health asks and shows


class ServePool:
    """role: whose status is reported if workers have both roles."""

    def __init__(self, handle: Any, role: Role, calls: OwnCalls) -> None:
        self._handle = handle
        self._role = role
        self._calls = calls
        self._room_of_each = UNTOLD_ROOM
        # Made once, as each costs as much as a small call.
        self._encode = handle.options(method_name="encode", request_serialization="pickle")
        self._decode = handle.options(method_name="decode", request_serialization="pickle")

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        with self._call(request) as (key, request):
            reply: EncodeReply = await call_worker(self._encode.remote(request))
            kept = request.kept_key if reply.reused is not None else b""
            self._answered(key, reply.load, kept)
            return reply

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        with self._call(request) as (key, request):
            result: DecodeResult = await call_worker(self._decode.remote(request))
            self._answered(key, result.load)
            return result

    def room(self) -> Room:
        return Room(self._size, self._room_of_each)

    def has(self, kv_key: bytes) -> bool:
        calls = self._calls
        return calls.kept_at(kv_key) is not None or calls.place_of(kv_key) is not None

    @property
    def _size(self) -> int:
        return self._calls.sizes.get(str(self._handle.deployment_id), 0)

    def _answered(self, key: Hashable, load: WorkerLoad | None, kept: bytes = b"") -> None:
        self._calls.answered(key, load, kept)
        if load is not None and load.capacity:
            in_time = ROOM_S / load.window_s if load.window_s else 0.0
            room = max(BATCHES * load.capacity, in_time)
            self._room_of_each += NEWEST * (room - self._room_of_each)

    @contextmanager
    def _call(self, request: _R) -> Iterator[tuple[Hashable, _R]]:
        key, unwell = key_of(request), self._calls.unwell
        self._calls.begin(key)
        try:
            unwell = "" if unwell is None else str(getattr(unwell, "unique_id", unwell))
            yield key, replace(request, unwell=unwell) if unwell else request
        except WorkerError as error:
            # KV that cannot be read may be the fault of its encoder, or of the link to it.
            is_kv = isinstance(error, KVLostError | HandleRefusedError)
            may_be_kv = is_kv or isinstance(error, SequenceFailedError)
            self._calls.failed(key, is_worker_s_fault=not is_kv, may_be_kv=may_be_kv)
            raise
        except asyncio.CancelledError:
            self._calls.given_up(key)
            raise
        finally:
            self._calls.end(key)

    async def status(self) -> list[WorkerStatus]:
        """Return the status of all workers that answer, in a large pool of `N_ASKED` at random."""
        size = self._size
        is_large = size > N_ASKED
        try:
            if is_large:
                asked = [
                    self._handle.options(method_name="status").remote() for _ in range(N_ASKED)
                ]
                answers = await asyncio.gather(*map(_in_time, asked), return_exceptions=True)
            else:
                answers = await self._handle.broadcast("status").results_async(
                    timeout_s=STATUS_TIMEOUT_S, return_exceptions=True
                )
        except Exception as error:  # a pool that does not answer is no failure of /health
            logger.debug("the status of a pool cannot be had: %s", error)
            return []
        each = (answer if isinstance(answer, tuple) else (answer,) for answer in answers)
        found = [
            status
            for statuses in each
            for status in statuses
            if isinstance(status, WorkerStatus) and status.role == self._role
        ]
        if is_large:  # some may have been asked twice
            return list({one.replica: replace(one, of_workers=size) for one in found}.values())
        return found


async def _in_time(response: Any) -> Any:
    async with asyncio.timeout(STATUS_TIMEOUT_S):
        return await call_worker(response)


async def call_worker(response: Any) -> Any:
    """Await a Serve response.

    Raises the worker's SplitscribeError; WorkerDiedError; WorkerGoneError: it was unreachable, or
    failed outside of our code; OverloadedError: Serve's own queue limit; CancelledError.
    """
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise
    except Exception as error:
        ours = _as_ours(error)
        if ours is error:
            raise
        raise ours from (None if isinstance(error, SplitscribeError) else error)


def _as_ours(error: Exception) -> Exception:
    # Imported here, as only failures need it.
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, RayServeException

    if isinstance(error, SplitscribeError):
        # Ray's dual class: return the plain one.
        cause = error.cause if isinstance(error, RayTaskError) else None
        return cause if isinstance(cause, SplitscribeError) else error
    if isinstance(error, BackPressureError):
        return OverloadedError("the workers' queues are full", retry_after_s=1.0)
    if isinstance(error, RayActorError) and not isinstance(error, ActorUnavailableError):
        return WorkerDiedError(f"a worker died: {type(error).__name__}: {error}")
    if isinstance(error, RayError | RayServeException):
        return WorkerGoneError(f"a worker failed: {type(error).__name__}: {error}")
    return error


def pools_of(
    encoders: Mapping[str, Any], decoders: Mapping[str, Any]
) -> dict[str, tuple[ServePool, ServePool]]:
    return {
        name: (
            ServePool(encoder, "encoder", OWN_CALLS),
            ServePool(decoders[name], "decoder", OWN_CALLS),
        )
        for name, encoder in encoders.items()
    }

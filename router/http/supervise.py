"""Runs a request's work while somebody waits for it: until it is done, too late, or unwanted."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from cluster.common.errors import DeadlineExceededError, WorkerError
from router.http.uploads import ClientDisconnectedError, Receive
from router.interface import RequestContext

GRACE_S = 1.0  # for the pipeline to end by its own deadline, with a better message

T = TypeVar("T")


async def supervise(work: Coroutine[Any, Any, T], receive: Receive, context: RequestContext) -> T:
    """Await `work`; cancel it, and wait until it has ended, when nobody needs it any more.

    Args:
        work: the request's work.
        receive: the ASGI channel, whose body has been read to its end.
        context: its remaining time is asked for again each time it seems over, as it can grow.

    Raises:
        ClientDisconnectedError: the client hung up.
        DeadlineExceededError: the time is over and `work` did not say so itself.
    """
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(_hang_up(receive))
    try:
        while (left_s := context.remaining_s() + GRACE_S) > 0:
            await asyncio.wait({task, hang_up}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():  # by something inside; our own caller was not cancelled
                raise WorkerError("the work was cancelled inside the cluster")
            if task.done():
                return task.result()
            if hang_up.done():
                raise ClientDisconnectedError
        raise DeadlineExceededError(
            f"the request did not finish within its deadline of {context.deadline_s:.0f} s"
        )
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

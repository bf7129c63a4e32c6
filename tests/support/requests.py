"""What tests need that drive the transcriber, or play its pools, themselves."""

from __future__ import annotations

from cluster.common.messages import CrossKVHandle, EncodeRequest, WorkerStatus
from router.interface import RequestContext
from router.pools import Unbounded


def request_context(request_id: str = "test", seconds: float = 300.0) -> RequestContext:
    return RequestContext.unlimited(request_id, seconds)


class AnyPool(Unbounded):
    async def status(self) -> list[WorkerStatus]:
        return []


def handle_of(request: EncodeRequest, lease: str) -> CrossKVHandle:
    return CrossKVHandle(
        request.request_id, request.window, request.attempt, "agent", b"", "", (1,), 1,
        request.context or 1500, 1, 1, lease, 10.0,
    )  # fmt: skip

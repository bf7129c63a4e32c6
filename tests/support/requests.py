"""What a request needs besides its audio, for tests that drive the transcriber themselves."""

from __future__ import annotations

from router.interface import RequestContext


def request_context(request_id: str = "test", seconds: float = 300.0) -> RequestContext:
    return RequestContext.unlimited(request_id, seconds)

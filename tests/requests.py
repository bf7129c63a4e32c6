"""What a request needs besides its audio, for tests that drive the pipeline themselves."""

from __future__ import annotations

from router.seams import RequestContext


class Unlimited:
    """An AudioLedger that lets every request in."""

    def expect(self, audio_s: float) -> None:
        """Any length is welcome."""

    found = expect


def request_context(request_id: str = "test", seconds: float = 300.0) -> RequestContext:
    """A request that has `seconds` from now, however long its audio is."""
    return RequestContext(request_id, Unlimited(), seconds, 1.0, seconds)

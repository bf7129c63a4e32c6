"""Whether a request may come in, by the seconds of audio that this router already holds.

A request is admitted as a whole, before the first byte of its answer: first by its size in
bytes, then by the length that its container states, so that a client learns of an overload at once
and not in the middle of a transcript. Knows nothing of HTTP; each router replica counts for itself.
"""

from __future__ import annotations

import logging
from types import TracebackType

from cluster.errors import OverloadedError

logger = logging.getLogger(__name__)

BYTES_PER_AUDIO_S = 16_000  # first guess: 128 kbit/s; speech codecs hold more audio, PCM less
RETRY_AFTER_S = 5.0
MAX_REQUESTS = 1024  # at once, however short: each holds a connection and a file


class Admission:
    """Counts pending audio-seconds. Not thread-safe: one event loop uses it."""

    def __init__(self, max_pending_audio_s: float) -> None:
        self._max_pending_s = max_pending_audio_s
        self._pending_s = 0.0
        self._requests = 0

    @property
    def pending_audio_s(self) -> float:
        """Audio-seconds of all admitted requests, as far as known."""
        return self._pending_s

    @property
    def requests(self) -> int:
        """Admitted requests that have not ended."""
        return self._requests

    def admit(self, upload_bytes: int) -> AdmittedRequest:
        """Let a request in by the size of its upload, until its context ends.

        Raises:
            OverloadedError: too much audio or too many requests are pending. A request that is
                alone always fits.
        """
        estimate_s = upload_bytes / BYTES_PER_AUDIO_S
        self._check(self._pending_s, self._requests, estimate_s)
        self._pending_s += estimate_s
        self._requests += 1
        return AdmittedRequest(self, estimate_s)

    def _check(self, others_s: float, others: int, wanted_s: float) -> None:
        too_long = bool(others) and others_s + wanted_s > self._max_pending_s
        if too_long or others >= MAX_REQUESTS:
            logger.info(
                "refused: %d requests with %.0f s pending, %.0f s wanted",
                others,
                others_s,
                wanted_s,
            )
            raise OverloadedError(
                "The server is overloaded with other requests. Please try again shortly.",
                code="overloaded",
                retry_after_s=RETRY_AFTER_S,
            )

    def _change(self, by_s: float) -> None:
        self._pending_s += by_s

    def _leave(self, audio_s: float) -> None:
        self._requests -= 1
        self._pending_s = self._pending_s - audio_s if self._requests else 0.0


class AdmittedRequest:
    """One request's share; implements `router.interface.AudioShare`."""

    def __init__(self, admission: Admission, audio_s: float) -> None:
        self._admission = admission
        self._audio_s = audio_s
        self._left = False

    @property
    def audio_s(self) -> float:
        """Audio-seconds that it is counted with."""
        return self._audio_s

    def expect(self, audio_s: float) -> None:
        """Replace the estimate.

        Raises:
            OverloadedError: with the true length it does not fit beside the others.
        """
        others_s = self._admission.pending_audio_s - self._audio_s
        self._admission._check(others_s, self._admission.requests - 1, audio_s)
        self._set(audio_s)

    def found(self, audio_s: float) -> None:
        """Count at least `audio_s`. Work has begun, so this is never refused."""
        self._set(max(audio_s, self._audio_s))

    def __enter__(self) -> AdmittedRequest:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._left:
            self._left = True
            self._admission._leave(self._audio_s)

    def _set(self, audio_s: float) -> None:
        if not self._left:
            self._admission._change(audio_s - self._audio_s)
            self._audio_s = audio_s

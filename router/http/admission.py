"""Whether a request may come in, by the seconds of audio that this router already holds.

A request is admitted as a whole, before the first byte of its answer: first by its size in
bytes, then by the length that its container states, so that a client learns of an overload at once
and not in the middle of a transcript. How much may be pending follows what requests waited for:
above `MOST_WAIT` of their deadlines they would not be done in time, and to take them in would keep
the workers busy for nobody. But a long wait may also come from a cold start or a lost worker, so
the limit never falls below `LEAST_SHARE` of the setting, and is the whole setting again after
`QUIET_S + RECOVERY_S` in which nothing waits long. Each router replica counts for itself.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable

from cluster.common.errors import CrowdedError, DeadlineExceededError
from router.interface import RequestContext, TranscriptionResult

logger = logging.getLogger(__name__)

BYTES_PER_AUDIO_S = 16_000  # first guess: 128 kbit/s; speech codecs hold more audio, PCM less
RETRY_AFTER_S = 5.0
MAX_REQUESTS = 1024  # at once, however short: each holds a connection and a file
MOST_WAIT = 0.4  # of its deadline, that a request may wait for others; the rest is for its own work
LEAST_SHARE = 0.1  # of the setting may be pending, whatever requests waited for
QUIET_S = 10.0  # without long waits, before the limit begins to grow
RECOVERY_S = 50.0  # from the least to the whole setting; it grows by the same factor each second


class Admission:
    """Counts pending audio-seconds. Not thread-safe: one event loop uses it."""

    def __init__(
        self, max_pending_audio_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """max_pending_audio_s: the limit, until requests wait for too long."""
        self.requests = 0  # admitted, and not ended
        self.pending_audio_s = 0.0  # of all of them, as far as known
        self._monotonic = monotonic
        self._max_pending_s = max_pending_audio_s
        self._limit_s = max_pending_audio_s  # when something waited long last
        self._limited_at_s = monotonic()

    def admit(self, upload_bytes: int) -> AdmittedRequest:
        """Let a request in by the size of its upload, until its context ends.

        Raises:
            CrowdedError: too much audio or too many requests are pending. A request that is
                alone always fits.
        """
        estimate_s = upload_bytes / BYTES_PER_AUDIO_S
        self._check(self.pending_audio_s, self.requests, estimate_s)
        self.pending_audio_s += estimate_s
        self.requests += 1
        return AdmittedRequest(self, estimate_s)

    @property
    def limit_audio_s(self) -> float:
        """Audio-seconds that may be pending now."""
        grown_s = self._monotonic() - self._limited_at_s - QUIET_S
        if grown_s >= RECOVERY_S:
            return self._max_pending_s
        growth = math.pow(LEAST_SHARE, -max(0.0, grown_s) / RECOVERY_S)
        return min(self._max_pending_s, self._limit_s * growth)

    def _waited(self, pending_s: float, share: float) -> None:
        """A request waited for `share` of its deadline; `pending_s` was there when it came.

        What waits grows with what is pending: so much as would have let it wait `MOST_WAIT` is the
        limit. It is taken from when the request came, so that all that came with it say the same.
        While requests wait for half as long as they may, the limit does not grow.
        """
        if share <= MOST_WAIT / 2:
            return
        limit_s = self.limit_audio_s
        if share > MOST_WAIT:
            least_s = LEAST_SHARE * self._max_pending_s
            fits_s = max(least_s, pending_s * MOST_WAIT / share)
            if fits_s < limit_s:
                logger.info(
                    "requests wait too long: %.0f s may be pending, not %.0f", fits_s, limit_s
                )
                limit_s = fits_s
        self._limit_s, self._limited_at_s = limit_s, self._monotonic()

    def _check(self, others_s: float, others: int, wanted_s: float) -> None:
        too_long = bool(others) and others_s + wanted_s > self.limit_audio_s
        if too_long or others >= MAX_REQUESTS:
            logger.info(
                "refused: %d requests with %.0f s pending, %.0f s wanted",
                others,
                others_s,
                wanted_s,
            )
            raise CrowdedError(
                "The server is overloaded with other requests. Please try again shortly.",
                retry_after_s=RETRY_AFTER_S,
            )


class AdmittedRequest:
    """One request's share; implements `router.interface.AudioShare`."""

    def __init__(self, admission: Admission, audio_s: float) -> None:
        self.audio_s = audio_s  # that it is counted with
        self._admission = admission
        self._pending_s = admission.pending_audio_s  # when it came, its own included
        self._left = False

    def expect(self, audio_s: float) -> None:
        """Replace the estimate.

        Raises:
            CrowdedError: with the true length it does not fit beside the others.
        """
        others_s = self._admission.pending_audio_s - self.audio_s
        self._admission._check(others_s, self._admission.requests - 1, audio_s)
        self._set(audio_s)

    def found(self, audio_s: float) -> None:
        """Count at least `audio_s`. Work has begun, so this is never refused."""
        self._set(max(audio_s, self.audio_s))

    def waited(self, share: float) -> None:
        """It is done, and waited for others for this share of its deadline; 1: it was not done."""
        self._admission._waited(max(self._pending_s, self.audio_s), share)

    def __enter__(self) -> AdmittedRequest:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._left:
            self._left = True
            admission = self._admission
            admission.requests -= 1
            admission.pending_audio_s -= self.audio_s
            if not admission.requests:
                admission.pending_audio_s = 0.0  # without what rounding left

    def _set(self, audio_s: float) -> None:
        if not self._left:
            self._admission.pending_audio_s += audio_s - self.audio_s
            self.audio_s = audio_s


async def telling_waits(
    share: AdmittedRequest, context: RequestContext, work: Awaitable[TranscriptionResult]
) -> TranscriptionResult:
    """Await a request's work, and tell its share what it waited for others.

    That is the time that none of its stages took; windows that were side by side count as if they
    had come one by one, so a long file says little.
    """
    try:
        result = await work
    except DeadlineExceededError:
        share.waited(1.0)
        raise
    timings = result.timings
    work_s = timings.audio_s + timings.encode_s + timings.transfer_s + timings.decode_s
    took_s = context.clock.monotonic() - context.started_s
    share.waited(max(0.0, took_s - work_s) / context.deadline_s)
    return result

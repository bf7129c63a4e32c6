"""Admit requests by the seconds of audio that are pending in this router.

Requests are checked by their announced bytes, then by the length in their container. The limit
falls while first windows wait for more than `MOST_WAIT_S`, and grows back within a minute.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from cluster.common.errors import CrowdedError
from router.interface import StageTimings

logger = logging.getLogger(__name__)

BYTES_PER_AUDIO_S = 16_000  # first guess: 128 kbit/s; speech codecs hold more audio, PCM less
RETRY_AFTER_S = 5.0
MAX_REQUESTS = 1024  # at once, however short: each holds a connection and a file
MOST_WAIT_S = 60.0  # of a request's first window in all queues
N_WAITS = 8  # requests whose median wait is compared with `MOST_WAIT_S`
LEAST_SHARE = 0.1  # of the setting: the limit's minimum
QUIET_S = 10.0  # without long waits, before the limit begins to grow
DOUBLED_S = 12.0  # time in which it then doubles


class Admission:
    """Counts pending audio-seconds. Not thread-safe: one event loop uses it."""

    def __init__(
        self, max_pending_audio_s: float, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.requests = 0  # admitted and not ended
        self.pending_audio_s = 0.0  # of all of them, as far as known
        self._monotonic = monotonic
        self._max_pending_s = max_pending_audio_s
        self._limit_s = max_pending_audio_s  # at `_limited_at_s`, from which time it grows
        self._limited_at_s = monotonic()
        self._waits: deque[tuple[float, float]] = deque(maxlen=N_WAITS)  # since the limit last fell

    def admit(self, upload_bytes: int) -> AdmittedRequest:
        """Admit a request until its context ends. The only one always fits. Raises CrowdedError."""
        estimate_s = upload_bytes / BYTES_PER_AUDIO_S
        self._check(self.pending_audio_s, self.requests, estimate_s)
        self.requests += 1
        return AdmittedRequest(self)

    @property
    def limit_audio_s(self) -> float:
        grown_s = max(0.0, self._monotonic() - self._limited_at_s - QUIET_S)
        return min(self._max_pending_s, self._limit_s * math.exp2(min(grown_s / DOUBLED_S, 100.0)))

    def _waited(self, wait_s: float, pending_s: float) -> None:
        """Lower the limit if first windows wait too long. `pending_s` was pending at admission.

        Waits are proportional to pending audio, so the new limit is that with which the median
        request would have waited `MOST_WAIT_S`, but at least half of the old one. A wait of more
        than half of `MOST_WAIT_S` keeps the limit from growing.
        """
        self._waits.append((wait_s, pending_s))
        if wait_s <= MOST_WAIT_S / 2:
            return
        limit_s = self.limit_audio_s
        if len(self._waits) == N_WAITS and median(wait for wait, _ in self._waits) > MOST_WAIT_S:
            fits_s = median(there * MOST_WAIT_S / max(wait, 1.0) for wait, there in self._waits)
            fits_s = max(fits_s, limit_s / 2, LEAST_SHARE * self._max_pending_s)
            if fits_s < limit_s:
                logger.info("queues are long: %.0f s may be pending, not %.0f", fits_s, limit_s)
                limit_s = fits_s
                self._waits.clear()
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
    def __init__(self, admission: Admission) -> None:
        self.audio_s = 0.0  # its part of `Admission.pending_audio_s`
        self._admission = admission
        self._pending_s = 0.0  # of all requests, when its length became known
        self._left = False

    def received(self, n_bytes: int) -> None:
        """Count more bytes of the upload. Raises nothing: the announced length was checked."""
        self._set(self.audio_s + n_bytes / BYTES_PER_AUDIO_S)

    def expect(self, audio_s: float) -> None:
        """Count the container's length instead. Raises CrowdedError if it does not fit."""
        others_s = self._admission.pending_audio_s - self.audio_s
        self._admission._check(others_s, self._admission.requests - 1, audio_s)
        self._set(audio_s)
        self._pending_s = others_s + audio_s

    def found(self, audio_s: float) -> None:
        """Count at least `audio_s`. Raises nothing: work has begun."""
        self._set(max(audio_s, self.audio_s))

    def done(self, timings: StageTimings) -> None:
        """Note how long its first window waited, unless a worker's failure made it wait."""
        if not timings.failures:
            self._admission._waited(timings.first_queue_s, self._pending_s)

    def __enter__(self) -> AdmittedRequest:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._left:
            self._left = True
            admission = self._admission
            admission.requests -= 1
            admission.pending_audio_s -= self.audio_s
            if not admission.requests:
                admission.pending_audio_s = 0.0  # removes rounding errors

    def _set(self, audio_s: float) -> None:
        if not self._left:
            self._admission.pending_audio_s += audio_s - self.audio_s
            self.audio_s = audio_s

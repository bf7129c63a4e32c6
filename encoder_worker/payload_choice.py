"""`handoff: auto`: whether the next batch is published as cross-attention KV or as encoder states.

The encoder decides, because it is the end of the link that is known when it matters: which decoder
reads a window is settled later, by load. So what counts is the mix of decoders that read from this
encoder lately. Each of them reports with its release, on the transfer's own channel, how long its
READ took and how long it takes to project a window; none of it passes through the router.

States are better when `S_states / BW + tP < S_kv / BW`. Whole windows are compared: bytes times
the link's seconds per byte, plus, for states, the projection in the decoder, during which its
running batch stands still. The encoder's own projection is not counted against KV, since it is
part of a batch that is busy anyway; until a decoder has reported its time, the encoder's is used.

Two things keep it calm. The link's speed is the median of the last N_READS, so that one slow READ
means nothing. And a change needs the other payload to be better by 20 % over N_READS READs, all of
them since the last change. It begins with KV, which is right on one host and over NVLink; elsewhere
N_READS windows tell.

What it cannot see: small READs take longer per byte than large ones, so once states travel, a link
looks a little slower than it is. That errs towards states, whose cost is bounded by a projection,
where KV's over a slow link is not.
"""

from __future__ import annotations

import logging
import statistics
import threading
from collections import deque
from collections.abc import Mapping

from cluster.kv.transfer_config import ReadReport
from cluster.messages import Payload

logger = logging.getLogger(__name__)

N_READS = 16
BETTER = 0.8  # of the present cost: from here on a change pays
LEAST_READ_S = 1e-6  # the unit in which a READ is reported


class HandoffChoice:
    """Which payload to publish. Exporters' threads report, and the engine's thread asks."""

    def __init__(self, window_bytes: Mapping[Payload, int], projection_s: float) -> None:
        """`projection_s`: what projecting one window takes here, until a decoder has reported."""
        self._window_bytes = window_bytes
        self._projection_s = projection_s
        self._s_per_byte: deque[float] = deque(maxlen=N_READS)
        self._lock = threading.Lock()
        self._payload: Payload = "cross_kv"

    @property
    def payload(self) -> Payload:
        return self._payload

    def note(self, report: ReadReport) -> None:
        """Take a decoder's report on a READ of either payload, and change if that pays."""
        with self._lock:
            if report.projection_s > 0:
                self._projection_s = report.projection_s
            self._s_per_byte.append(max(report.read_s, LEAST_READ_S) / report.n_bytes)
            if len(self._s_per_byte) < N_READS:
                return
            other: Payload = "encoder_states" if self._payload == "cross_kv" else "cross_kv"
            now_s, then_s = self._cost_s(self._payload), self._cost_s(other)
            if then_s >= BETTER * now_s:
                return
            gb_per_s = 1e-9 / statistics.median(self._s_per_byte)
            logger.info(
                "handing over %s from now on: %.1f ms a window instead of %.1f, at %.2f GB/s",
                other,
                1000 * then_s,
                1000 * now_s,
                gb_per_s,
            )
            self._payload = other
            self._s_per_byte.clear()

    def _cost_s(self, payload: Payload) -> float:
        """Seconds from a window's publication to its KV in a decoder's pages."""
        moved_s = self._window_bytes[payload] * statistics.median(self._s_per_byte)
        return moved_s + (self._projection_s if payload == "encoder_states" else 0.0)

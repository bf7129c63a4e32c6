"""Uploads of a simulated router: processor time of its audio workers, and windows of silence.

In the place of `AudioPool`. The windows have the lengths that the request was drawn with; what is
in them does not matter, since nobody hears it.
"""

from __future__ import annotations

import asyncio
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any, Self

import numpy as np

from cluster.messages import SAMPLE_RATE, WINDOW_SAMPLES
from cluster.planning.profile.model import AudioProfile
from cluster.planning.scenario.arrivals import LoadRequest, Traffic
from router.audio.windows import Window

_SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
_SILENCE.flags.writeable = False


class Server:
    """Processes that work on what comes, first come first served. busy_s: of all of them."""

    def __init__(self, n_processes: int) -> None:
        self.busy_s = 0.0
        self._free_at_s = [0.0] * n_processes
        heapify(self._free_at_s)

    def take(self, now_s: float, seconds: float) -> float:
        """When work that comes now is done."""
        done_s = max(now_s, self._free_at_s[0]) + seconds
        heapreplace(self._free_at_s, done_s)
        self.busy_s += seconds
        return done_s


class SimStream:
    """In the place of `AudioStream`."""

    def __init__(self, request: LoadRequest, begun_s: float, cpu_s: float, spread_s: float) -> None:
        self.expected_s: float | None = request.audio_s
        self.duration_s = request.audio_s
        self.decode_s = cpu_s
        self._cuts_s = request.cuts_s
        self._begun_s = begun_s
        self._spread_s = spread_s
        self._next = 0
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window:
        """A window is found when the audio is decoded so far."""
        index = self._next
        if index == len(self._cuts_s):
            raise StopAsyncIteration
        self._next += 1
        start_s = self._cuts_s[index - 1] if index else 0.0
        end_s = self._cuts_s[index]
        found_s = self._begun_s + self._spread_s * end_s / self.duration_s
        wait_s = found_s - self._loop.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        first, last = round(start_s * SAMPLE_RATE), round(end_s * SAMPLE_RATE)
        return Window(index, first, _SILENCE[: max(1, last - first)])


class SimAudio:
    """In the place of `AudioPool`."""

    def __init__(self, profile: AudioProfile, n_workers: int, traffic: Traffic) -> None:
        self.server = Server(n_workers)
        self._profile = profile
        self._traffic = traffic
        self._loop = asyncio.get_running_loop()

    def open(self, upload: Path, *, request_id: str, **_: Any) -> SimStream:
        """The upload waits for a worker, which then decodes it from its beginning to its end."""
        request = self._traffic.requests[request_id]
        spread_s = self._profile.audio_second_s * request.audio_s
        cpu_s = self._profile.request_s + spread_s
        done_s = self.server.take(self._loop.time(), cpu_s)
        return SimStream(request, done_s - spread_s, cpu_s, spread_s)

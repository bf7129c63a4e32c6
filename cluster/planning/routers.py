"""A simulated router: real admission, transcriber, pipeline and choice, over simulated parts.

What is real is all that decides: `Admission`, `RequestContext`, `RequestTranscriber` with
`ParallelRun` and `Pipeline`, `ServePool` with its calls. The processor time of the event loop and
of the audio workers are waits from the profile. HTTP is not there, and windows are silence of the
lengths that the request was drawn with: nobody hears it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from heapq import heapreplace
from pathlib import Path
from typing import Any, Self

import numpy as np

from cluster.common.errors import SplitscribeError
from cluster.common.messages import SAMPLE_RATE, WINDOW_SAMPLES, Role
from cluster.common.metrics import ROUTER_METRICS, MetricSpec, Recorder
from cluster.common.model.encoder_context import EncoderContext
from cluster.planning.pools import Choice, OfTwo, SimHandle, SimPool
from cluster.planning.report import Records
from cluster.planning.scenario import LoadRequest
from cluster.planning.worker import Cell
from cluster.serve.own_calls import OwnCalls
from cluster.serve.serve_pool import ServePool
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.http.admission import BYTES_PER_AUDIO_S, Admission, telling_waits
from router.interface import DeadlineRule, RequestContext
from router.transcriber import RequestTranscriber

RETRIES = "splitscribe_window_retries_total"
SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
SILENCE.flags.writeable = False


@dataclass(frozen=True, slots=True)
class _Retries:
    """Counts the pipeline's retries; all other metrics of the router are let go."""

    spec: MetricSpec
    records: Records

    def inc(self, value: float, tags: Any = None) -> None:
        if self.spec.name == RETRIES and tags:
            self.records.retries[tags["reason"]] += 1

    def set(self, value: float, tags: Any = None) -> None:
        """Nobody looks at it."""

    observe = set


class Processes:
    """Work on what comes, first come first served."""

    def __init__(self, n_processes: int) -> None:
        self._free_at_s = [0.0] * n_processes  # a heap

    def take(self, now_s: float, seconds: float) -> float:
        """When work that comes now is done."""
        done_s = max(now_s, self._free_at_s[0]) + seconds
        heapreplace(self._free_at_s, done_s)
        return done_s


class SimStream:
    """In the place of `AudioStream`: a window is found when the audio is decoded so far."""

    def __init__(self, request: LoadRequest, begun_s: float, spread_s: float, cpu_s: float) -> None:
        self.duration_s = self.expected_s = request.audio_s
        self.decode_s = cpu_s
        self._cuts_s = request.cuts_s
        self._begun_s, self._spread_s = begun_s, spread_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def __aiter__(self) -> AsyncIterator[Window]:
        loop, first = asyncio.get_running_loop(), 0
        for index, end_s in enumerate(self._cuts_s):
            found_s = self._begun_s + self._spread_s * end_s / self.duration_s
            if (wait_s := found_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            last = round(end_s * SAMPLE_RATE)
            yield Window(index, first, SILENCE[: max(1, last - first)])
            first = last


class SimAudio:
    """In the place of `AudioPool`."""

    def __init__(self, cell: Cell) -> None:
        self._processes = Processes(cell.settings.router.audio_workers)
        self._cell = cell

    def open(self, upload: Path, *, request_id: str, **_: Any) -> SimStream:
        """The upload waits for a process, which then decodes it from its beginning to its end."""
        request, costs = self._cell.requests[request_id], self._cell.profile.audio
        spread_s = costs.audio_second_s * request.audio_s
        cpu_s = costs.request_s + spread_s
        done_s = self._processes.take(self._cell.clock.monotonic(), cpu_s)
        return SimStream(request, done_s - spread_s, spread_s, cpu_s)


class SimRouter:
    """One replica of the router."""

    def __init__(
        self, cell: Cell, pools: dict[Role, SimPool], records: Records, *, language_known: bool
    ) -> None:
        settings = cell.settings.router
        self.admission = Admission(settings.max_pending_audio_s, cell.clock.monotonic)
        self._cpu = Processes(1)
        self._cell = cell
        self._records = records
        self._deadline = DeadlineRule(
            settings.min_deadline_s, settings.deadline_factor, settings.max_deadline_s
        )
        self._params = TranscriptionParams("whisper-1", "en" if language_known else None)
        calls = OwnCalls(cell.clock.monotonic)
        self.handles = {role: _handle(pools[role], role, calls, cell) for role in pools}
        simulated: Any = SimAudio(cell)
        self._transcriber = RequestTranscriber(
            simulated,
            ServePool(self.handles["encoder"], "encoder", calls),
            ServePool(self.handles["decoder"], "decoder", calls),
            cell.tokenizer,
            settings,
            Recorder(ROUTER_METRICS, partial(_Retries, records=records)),
            dims=cell.dims,
            context=_context(cell),
            clock=cell.clock,
            reuses_kv=False,  # every request's audio is its own
        )

    async def answer(self, request: LoadRequest) -> None:
        """One request, from its arrival to its answer or its error."""
        answers, now = self._records.of(request.priority), self._cell.clock.monotonic
        try:
            await self._transcribe(request)
        except SplitscribeError as error:
            answers.add(request.at_s, request.audio_s, math.inf)
            answers.failures[f"{error.status} {error.code or type(error).__name__}"] += 1
        else:
            answers.add(request.at_s, request.audio_s, now() - request.at_s)

    async def _transcribe(self, request: LoadRequest) -> None:
        cell, costs = self._cell, self._cell.profile.router
        cpu_s = costs.request_s + costs.window_s * len(request.cuts_s)
        with self.admission.admit(round(request.audio_s * BYTES_PER_AUDIO_S)) as share:
            await self._work(cpu_s / 2)  # a half of it before the answer is known, and a half after
            context = RequestContext(
                request.name, share, self._deadline, cell.clock, priority=request.priority
            )
            cell.requests[request.name] = request
            try:
                work = self._transcriber.transcribe(Path("simulated"), self._params, context)
                await telling_waits(share, context, work)
            finally:
                del cell.requests[request.name]
            await self._work(cpu_s / 2)

    async def _work(self, seconds: float) -> None:
        now_s = self._cell.clock.monotonic()
        await asyncio.sleep(self._cpu.take(now_s, seconds) - now_s)


def _context(cell: Cell) -> EncoderContext | None:
    """By which windows are trimmed: only where the settings ask for it."""
    encoder, usual = cell.settings.encoder, EncoderContext()
    if encoder.context != "trimmed":
        return None
    slack, longest_s = encoder.context_slack, encoder.context_max_s
    return EncoderContext(
        usual.slack if slack is None else slack,
        usual.max_content_s if longest_s is None else longest_s,
    )


def _handle(pool: SimPool, role: Role, calls: OwnCalls, cell: Cell) -> SimHandle:
    if pool.name == "worker":
        return SimHandle(pool, role, OfTwo(cell.random))
    return SimHandle(pool, role, Choice(calls, cell.random))

"""A simulated router: real admission, transcriber, pipeline and choice, over simulated parts.

Processor time of the event loop and of the audio workers are waits from the profile. HTTP is not
there, and windows are silence of the lengths that the request was drawn with.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cluster.common.errors import SplitscribeError
from cluster.common.messages import ROLES, SAMPLE_RATE, WINDOW_SAMPLES, Role
from cluster.planning.pools import SimHandle, SimPool
from cluster.planning.report import Records
from cluster.planning.scenario import LoadRequest
from cluster.planning.worker import Cell, Device
from cluster.serve.own_calls import OwnCalls
from cluster.serve.serve_pool import ServePool
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.http.admission import BYTES_PER_AUDIO_S, Admission
from router.interface import Progress, RequestContext
from router.transcriber import RequestTranscriber

SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
SILENCE.flags.writeable = False


@dataclass(slots=True)
class SimStream:
    """In the place of `AudioStream`: a window is found when the audio is decoded so far."""

    duration_s: float
    decode_s: float
    cuts_s: tuple[float, ...]
    begun_s: float
    spread_s: float

    @property
    def expected_s(self) -> float:
        return self.duration_s

    async def __aiter__(self) -> AsyncIterator[Window]:
        loop, first = asyncio.get_running_loop(), 0
        for index, end_s in enumerate(self.cuts_s):
            found_s = self.begun_s + self.spread_s * end_s / self.duration_s
            if (wait_s := found_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            last = round(end_s * SAMPLE_RATE)
            yield Window(index, first, SILENCE[: max(1, last - first)])
            first = last


class SimAudio:
    """In the place of `AudioPool`: an upload waits for a process, which decodes it in one go."""

    def __init__(self, cell: Cell) -> None:
        self._processes = Device(cell.settings.router.audio_workers)
        self._cell = cell

    def open(self, upload: Path, *, request_id: str, **_: Any) -> nullcontext[SimStream]:
        request, costs = self._cell.requests[request_id], self._cell.profile.audio
        spread_s = costs.audio_second_s * request.audio_s
        cpu_s = costs.request_s + spread_s
        begun_s = self._processes.launch(self._cell.clock.monotonic(), cpu_s) - spread_s
        return nullcontext(SimStream(request.audio_s, cpu_s, request.cuts_s, begun_s, spread_s))


class SimRouter:
    def __init__(
        self, cell: Cell, pools: dict[Role, SimPool], records: Records, *, language_known: bool
    ) -> None:
        settings, now = cell.settings.router, cell.clock.monotonic
        self.admission = Admission(settings.max_pending_audio_s, now)
        self._cpu = Device()
        self._cell = cell
        self._records = records
        self._stall_s = settings.stall_timeout_s
        self._progress = Progress()
        self._params = TranscriptionParams("whisper-1", "en" if language_known else None)
        calls = OwnCalls(now)
        encoders, decoders = (
            ServePool(SimHandle(pools[role], role, calls, cell.random), role, calls)
            for role in ROLES
        )
        audio: Any = SimAudio(cell)
        context_for = None
        if cell.context is not None:
            n_audio_ctx = cell.dims.n_audio_ctx
            context_for = partial(cell.context.positions_for, n_audio_ctx=n_audio_ctx)
        self._transcriber = RequestTranscriber(
            audio,
            encoders,
            decoders,
            cell.tokenizer,
            settings,
            dims=cell.dims,
            context_for=context_for,
            clock=cell.clock,
            reuses_kv=False,  # every request's audio is its own
        )

    async def answer(self, request: LoadRequest) -> None:
        latency_s = math.inf
        try:
            await self._transcribe(request)
        except SplitscribeError as error:
            why = f"{error.status} {error.code or type(error).__name__}"
            self._records.failures[request.priority][why] += 1
        else:
            latency_s = self._cell.clock.monotonic() - request.at_s
        self._records.answers[request.priority].append((request.at_s, request.audio_s, latency_s))

    async def _transcribe(self, request: LoadRequest) -> None:
        cell, costs = self._cell, self._cell.profile.router
        cpu_s = costs.request_s + costs.window_s * len(request.cuts_s)
        with self.admission.admit(round(request.audio_s * BYTES_PER_AUDIO_S)) as share:
            share.expect(request.audio_s)
            await self._work(cpu_s / 2)  # a half of it before the answer is known, and a half after
            context = RequestContext(
                request.name,
                share,
                self._stall_s,
                clock=cell.clock,
                progress=self._progress,
                priority=request.priority,
            )
            cell.requests[request.name] = request
            try:
                work = self._transcriber.transcribe(Path("simulated"), self._params, context)
                share.done((await work).timings)
            finally:
                del cell.requests[request.name]
            await self._work(cpu_s / 2)

    async def _work(self, seconds: float) -> None:
        now_s = self._cell.clock.monotonic()
        await asyncio.sleep(self._cpu.launch(now_s, seconds) - now_s)

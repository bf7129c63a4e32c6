"""A simulated router: real admission, transcriber, pipeline and choice, over simulated parts.

What is real is all that decides: `Admission`, `RequestContext`, `RequestTranscriber` with
`ParallelRun` and `Pipeline`, `ServePool` with its ledger. The event loop's processor time and the
audio workers' are waits from the profile. HTTP is not there.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.errors import SplitscribeError
from cluster.messages import Role
from cluster.metrics import ROUTER_METRICS, MetricSpec, Recorder
from cluster.model.dims import ModelDims
from cluster.model.encoder_context import EncoderContext
from cluster.planning.scenario.arrivals import LoadRequest
from cluster.planning.simulation.parts import CellParts, as_checkpoint
from cluster.planning.simulation.pools import (
    Choice,
    SimHandle,
    SimPool,
    by_load,
    of_two,
)
from cluster.planning.simulation.records import Records
from cluster.planning.simulation.uploads import Server, SimAudio
from cluster.serve.app import TOLD_WORKERS
from cluster.serve.serve_pool import ServePool
from cluster.serve.worker_choice import WorkLedger
from router.api.params import TranscriptionParams
from router.http.admission import BYTES_PER_AUDIO_S, Admission, telling_waits
from router.interface import DeadlineRule, RequestContext
from router.transcriber import RequestTranscriber

UPLOAD = Path("simulated")
LANGUAGE = "en"
RETRIES = "splitscribe_window_retries_total"


@dataclass(frozen=True, slots=True)
class _Retries:
    """Counts the pipeline's retries; all other metrics of the router are let go."""

    spec: MetricSpec
    records: Records

    def inc(self, value: float, tags: Any = None) -> None:
        if self.spec.name == RETRIES and tags:
            reason = tags["reason"]
            self.records.retries[reason] = self.records.retries.get(reason, 0) + 1

    def set(self, value: float, tags: Any = None) -> None:
        """Nobody looks at it."""

    observe = set


class SimRouter:
    """One replica of the router."""

    def __init__(
        self,
        cell: CellParts,
        pools: dict[Role, SimPool],
        records: Records,
        *,
        colocated: bool,
        language_known: bool,
    ) -> None:
        settings = cell.settings.router
        self.admission = Admission(settings.max_pending_audio_s, cell.clock.monotonic)
        self.cpu = Server(1)
        self.audio = SimAudio(cell.profile.audio, settings.audio_workers, cell.traffic)
        self._cell = cell
        self._records = records
        self._deadline = DeadlineRule(
            settings.min_deadline_s, settings.deadline_factor, settings.max_deadline_s
        )
        self._params = TranscriptionParams("whisper-1", LANGUAGE if language_known else None)
        self._loop = asyncio.get_running_loop()
        ledger = WorkLedger()
        self.handles = {
            role: _handle(pool, role, ledger, cell, colocated=colocated)
            for role, pool in pools.items()
        }
        dims: ModelDims = as_checkpoint(cell.profile).dims
        audio: Any = self.audio
        self._transcriber = RequestTranscriber(
            audio,
            ServePool(self.handles["encoder"], "encoder", ledger),
            ServePool(self.handles["decoder"], "decoder", ledger),
            cell.tokenizer,
            settings,
            Recorder(ROUTER_METRICS, partial(_Retries, records=records)),
            dims=dims,
            context=_context(cell),
            clock=cell.clock,
            reuses_kv=False,  # every request's audio is its own
        )

    async def answer(self, request: LoadRequest) -> None:
        """One request, from its arrival to its answer or its error."""
        try:
            await self._transcribe(request)
        except SplitscribeError as error:
            reason = f"{error.status} {error.code or type(error).__name__}"
            self._records.failed(request.priority, self._loop.time(), reason)
        else:
            latency_s = self._loop.time() - request.at_s
            self._records.answered(request.priority, request.at_s, request.audio_s, latency_s)

    async def _transcribe(self, request: LoadRequest) -> None:
        cell, costs = self._cell, self._cell.profile.router
        cpu_s = costs.request_s + costs.window_s * len(request.cuts_s)
        with self.admission.admit(round(request.audio_s * BYTES_PER_AUDIO_S)) as share:
            await self._work(cpu_s / 2)  # a half of it before the answer is known, and a half after
            context = RequestContext(
                request.name,
                share,
                self._deadline,
                cell.clock,
                priority=request.priority,
            )
            cell.traffic.requests[request.name] = request
            try:
                work = self._transcriber.transcribe(UPLOAD, self._params, context)
                await telling_waits(share, context, work)
            finally:
                del cell.traffic.requests[request.name]
            await self._work(cpu_s / 2)

    async def _work(self, seconds: float) -> None:
        now_s = self._loop.time()
        await asyncio.sleep(self.cpu.take(now_s, seconds) - now_s)


def _context(cell: CellParts) -> EncoderContext | None:
    """By which windows are trimmed: only where the settings ask for it."""
    encoder = cell.settings.encoder
    if encoder.context != "trimmed":
        return None
    usual = EncoderContext()
    slack, longest_s = encoder.context_slack, encoder.context_max_s
    return EncoderContext(
        usual.slack if slack is None else slack,
        usual.max_content_s if longest_s is None else longest_s,
    )


def _handle(
    pool: SimPool, role: Role, ledger: WorkLedger, cell: CellParts, *, colocated: bool
) -> SimHandle:
    if colocated:
        return SimHandle(pool, role, of_two(cell.random), None)
    most = max(len(pool.replicas), getattr(cell.settings, role).most)
    choice = Choice(ledger, cell.random, cell.clock.monotonic, asks=most > TOLD_WORKERS)
    return SimHandle(pool, role, by_load(choice), choice)

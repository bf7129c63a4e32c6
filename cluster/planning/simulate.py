"""Runs a scenario from its first request to its last answer, on a virtual clock.

One cell: its routers, its pools, and what Serve does once in a while. Of a router all is real but
HTTP: processor time of the event loop and of the audio workers are waits from the profile, and
windows are silence. A scenario and its seed give the same figures on every machine.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from cluster.common.cores import audio_workers_of
from cluster.common.errors import SplitscribeError
from cluster.common.messages import ROLES, SAMPLE_RATE, WINDOW_SAMPLES, Role
from cluster.planning.cell import Cell
from cluster.planning.devices import Device
from cluster.planning.pools import SimHandle, SimPool, make_pools
from cluster.planning.profile import Profile
from cluster.planning.report import Outcome
from cluster.planning.scenario import Arrival, LoadRequest, Scenario, arrivals
from cluster.planning.virtual_time import run_virtually
from cluster.serve.app import STATS_PERIOD_S
from cluster.serve.model_parts import make_transcriber
from cluster.serve.own_calls import OwnCalls
from cluster.serve.replica_count import Balancer
from cluster.serve.serve_pool import ServePool
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.http.admission import BYTES_PER_AUDIO_S, Admission
from router.interface import Progress, RequestContext

MOMENT_S = 1.0
GPU_MACHINE_CORES = 16  # where a profile tells none
SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
SILENCE.flags.writeable = False

OnProgress = Callable[[float, int], None]  # simulated seconds, requests that have come


def simulate(
    scenario: Scenario,
    profile: Profile,
    on_progress: OnProgress = lambda *_: None,
    rows: Sequence[Arrival] | None = None,
) -> Outcome:
    """Run it. rows: requests in the place of those that the load draws."""
    with _quiet():
        return run_virtually(_run(scenario, profile, on_progress, rows))


async def _run(
    scenario: Scenario, profile: Profile, on_progress: OnProgress, rows: Sequence[Arrival] | None
) -> Outcome:
    chance = Random(scenario.seed)
    load_chance, cell_chance = Random(chance.getrandbits(64)), Random(chance.getrandbits(64))
    cell = Cell(scenario, profile, cell_chance)
    cluster, loop, outcome = scenario.cluster, cell.loop, cell.outcome
    pools = make_pools(cell, cluster)
    routers = [SimRouter(cell, pools) for _ in range(cluster.routers)]
    for fault in scenario.faults:
        loop.call_at(fault.at_s, pools[fault.role].kill, fault.count)
    keeping = asyncio.create_task(_keep(cell, pools, routers, on_progress))
    async with asyncio.TaskGroup() as requests:
        for request in arrivals(scenario.load, load_chance, rows):
            if (wait_s := request.at_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            outcome.n_requests += 1
            router = routers[0] if len(routers) == 1 else cell_chance.choice(routers)
            requests.create_task(router.answer(request))
    keeping.cancel()
    outcome.seconds = loop.time()
    return outcome


async def _keep(
    cell: Cell, pools: dict[Role, SimPool], routers: list[SimRouter], on_progress: OnProgress
) -> None:
    """Autoscaling, leases, and a look at everything once a second."""
    balancer, busy_before, next_moment_s = Balancer(), dict.fromkeys(ROLES, 0.0), 0.0
    while True:
        now_s = cell.loop.time()
        for role in ROLES:
            pools[role].scale(balancer)
        if now_s >= next_moment_s:
            next_moment_s += MOMENT_S
            moment: dict[str, float] = {"at_s": now_s}
            for role in ROLES:
                workers = [replica.roles[role] for replica in pools[role].replicas]
                n_pages = sum(worker.pool.n_pages for worker in workers)
                busy_s = sum(worker.device.busy_s for worker in workers)
                gained_s = max(0.0, busy_s - busy_before[role])
                busy_before[role] = busy_s
                moment[f"{role}s"] = len(workers)
                moment[f"{role}_busy"] = min(1.0, gained_s / MOMENT_S / max(1, len(workers)))
                moment[f"{role}_pages"] = sum(one.pool.n_used for one in workers) / max(1, n_pages)
                for worker in workers:
                    worker.look_after_leases()
            moment["pending"] = sum(router.admission.requests for router in routers)
            cell.outcome.moments.append(moment)
            on_progress(now_s, cell.outcome.n_requests)
        await asyncio.sleep(STATS_PERIOD_S)


@contextmanager
def _quiet() -> Iterator[None]:
    """No log line below an error."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@dataclass(slots=True)
class SimStream:
    """In the place of `AudioStream`: a window is found when the audio is decoded so far."""

    request: LoadRequest
    begun_s: float
    spread_s: float
    decode_s: float

    @property
    def duration_s(self) -> float:
        return self.request.audio_s

    expected_s = duration_s

    async def __aiter__(self) -> AsyncIterator[Window]:
        loop, first = asyncio.get_running_loop(), 0
        for index, end_s in enumerate(self.request.cuts_s):
            found_s = self.begun_s + self.spread_s * end_s / self.duration_s
            if (wait_s := found_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            last = round(end_s * SAMPLE_RATE)
            yield Window(index, first, SILENCE[: max(1, last - first)])
            first = last


class SimAudio:
    """In the place of `AudioPool`: an upload waits for a process, which decodes it in one go."""

    def __init__(self, cell: Cell) -> None:
        cores = int(str(cell.profile.machine.get("cores", GPU_MACHINE_CORES)))
        self._processes = Device(audio_workers_of(cell.settings.router.audio_workers, cores))
        self._costs, self._now = cell.profile.audio, cell.clock.monotonic

    def open(self, upload: Any, _context: RequestContext, **_: Any) -> nullcontext[SimStream]:
        """upload: the request itself."""
        spread_s = self._costs.audio_second_s * upload.audio_s
        cpu_s = self._costs.request_s + spread_s
        begun_s = self._processes.launch(self._now(), cpu_s) - spread_s
        return nullcontext(SimStream(upload, begun_s, spread_s, cpu_s))


class SimRouter:
    def __init__(self, cell: Cell, pools: dict[Role, SimPool]) -> None:
        now, load = cell.clock.monotonic, cell.outcome.scenario.load
        self.admission = Admission(cell.settings.router.max_pending_audio_s, now)
        self._cell, self._cpu, self._progress = cell, Device(), Progress()
        self._params = TranscriptionParams("whisper-1", "en" if load.language_known else None)
        calls = OwnCalls(now)
        encoders, decoders = (
            ServePool(SimHandle(pools[role], role, calls, cell), role, calls) for role in ROLES
        )
        audio: Any = SimAudio(cell)
        self._transcriber = make_transcriber(
            cell.settings,
            cell.checkpoint,
            audio,
            encoders,
            decoders,
            clock=cell.clock,
            reuses_kv=False,  # every request's audio is its own
        )

    async def answer(self, request: LoadRequest) -> None:
        latency_s, outcome = math.inf, self._cell.outcome
        try:
            await self._transcribe(request)
        except SplitscribeError as error:
            why = f"{error.status} {error.code or type(error).__name__}"
            outcome.failures[request.priority][why] += 1
        else:
            latency_s = self._cell.loop.time() - request.at_s
        outcome.answers[request.priority].append((request.at_s, request.audio_s, latency_s))

    async def _transcribe(self, request: LoadRequest) -> None:
        cell, costs = self._cell, self._cell.profile.router
        cpu_s = costs.request_s + costs.window_s * len(request.cuts_s)
        with self.admission.admit(round(request.audio_s * BYTES_PER_AUDIO_S)) as share:
            share.expect(request.audio_s)
            await self._work(cpu_s / 2)  # a half of it before the answer is known, and a half after
            context = RequestContext(
                request.name,
                share,
                cell.settings.router.stall_timeout_s,
                clock=cell.clock,
                progress=self._progress,
                priority=request.priority,
            )
            upload: Any = request
            share.done((await self._transcriber.transcribe(upload, self._params, context)).timings)
            await self._work(cpu_s / 2)

    async def _work(self, seconds: float) -> None:
        now_s = self._cell.loop.time()
        await asyncio.sleep(self._cpu.launch(now_s, seconds) - now_s)

"""Runs a scenario from its first request to its last answer, on a virtual clock.

One cell: its routers, its pools, and what Serve does once in a while. Of a router all is real but
HTTP: processor time of the event loop and of the audio workers are waits from the profile, and
windows are silence. A scenario and its seed give the same records on every machine.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from cluster.common.cores import audio_workers_of
from cluster.common.errors import SplitscribeError
from cluster.common.messages import ROLES, SAMPLE_RATE, WINDOW_SAMPLES, Role
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.encoder_context import chosen_context
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import BUNDLED_MODEL, Settings
from cluster.planning.pools import SimHandle, SimPool, make_pools
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.report import Outcome, Records
from cluster.planning.scenario import Arrival, LoadRequest, Scenario, arrivals
from cluster.planning.virtual_time import run_virtually, virtual_clock
from cluster.planning.worker import Cell, Device, Links
from cluster.serve.app import STATS_PERIOD_S
from cluster.serve.own_calls import OwnCalls
from cluster.serve.replica_count import Balancer
from cluster.serve.serve_pool import ServePool
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.http.admission import BYTES_PER_AUDIO_S, Admission
from router.interface import Progress, RequestContext
from router.transcriber import RequestTranscriber

MOMENT_S = 1.0
GPU_MACHINE_CORES = 16  # where a profile tells none
SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
SILENCE.flags.writeable = False
GARBAGE = 200_000  # objects between two looks of Python's collector; they hold few circles

OnProgress = Callable[[float, int], None]  # simulated seconds, requests that have come


def simulate(
    scenario: Scenario,
    profile: Profile,
    on_progress: OnProgress = lambda *_: None,
    rows: Sequence[Arrival] | None = None,
) -> Outcome:
    """Run it. rows: requests in the place of those that the load draws."""
    with _quiet_and_quick():
        return run_virtually(_run(scenario, profile, on_progress, rows))


async def _run(
    scenario: Scenario, profile: Profile, on_progress: OnProgress, rows: Sequence[Arrival] | None
) -> Outcome:
    chance = Random(scenario.seed)
    load_chance, cell_chance = Random(chance.getrandbits(64)), Random(chance.getrandbits(64))
    cluster, records, loop = scenario.cluster, Records(), asyncio.get_running_loop()
    cell = _cell(scenario, profile, cell_chance)
    pools = make_pools(cell, cluster, records)
    routers = [
        SimRouter(cell, pools, records, language_known=scenario.load.language_known)
        for _ in range(cluster.routers)
    ]
    for fault in scenario.faults:
        loop.call_at(fault.at_s, pools[fault.role].kill, fault.count)
    keeping = asyncio.create_task(_keep(pools, routers, records, on_progress))
    async with asyncio.TaskGroup() as requests:
        for request in arrivals(scenario.load, load_chance, rows):
            if (wait_s := request.at_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            records.n_requests += 1
            router = routers[0] if len(routers) == 1 else cell_chance.choice(routers)
            requests.create_task(router.answer(request))
    keeping.cancel()
    return Outcome(scenario, profile, records, loop.time())


def _cell(scenario: Scenario, profile: Profile, chance: Random) -> Cell:
    cluster, between = scenario.cluster, profile.handoff
    if cluster.link_gbit_per_s is not None:
        rate, latency_s = cluster.link_gbit_per_s * 1e9 / 8, cluster.link_latency_s
        between = LinkProfile(transport="link", latency_s=latency_s, bytes_per_s=rate)
    bundled, settings = open_checkpoint(BUNDLED_MODEL, weights=False), scenario.settings
    # What the bundled checkpoint says of its windows holds for no other.
    nowhere = replace(bundled, path=Path("profile"))
    return Cell(
        profile=profile,
        settings=_resolved(settings, profile),
        clock=virtual_clock(chance),
        random=chance,
        links=Links(profile.handoff, between),
        tokenizer=WhisperTokenizer.from_checkpoint(bundled),
        dims=replace(bundled.dims, **profile.shape.model_dump()),
        context=chosen_context(nowhere, settings.encoder),
    )


def _resolved(settings: Settings, profile: Profile) -> Settings:
    """Sizes that are left open, as the profile's device has them."""
    resolved = {}
    for role, names in (
        ("encoder", ("max_batch", "export_windows")),
        ("decoder", ("max_batch", "kv_windows")),
    ):
        asked, of_device = getattr(settings, role), getattr(profile, role)
        sizes = {name: getattr(asked, name) or getattr(of_device, name) for name in names}
        resolved[role] = asked.model_copy(update=sizes)
    return settings.model_copy(update=resolved)


async def _keep(
    pools: dict[Role, SimPool], routers: list[SimRouter], records: Records, on_progress: OnProgress
) -> None:
    """Autoscaling, leases, and a look at everything once a second."""
    balancer, busy_before, next_moment_s = Balancer(), dict.fromkeys(ROLES, 0.0), 0.0
    while True:
        now_s = asyncio.get_running_loop().time()
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
            records.moments.append(moment)
            on_progress(now_s, records.n_requests)
        await asyncio.sleep(STATS_PERIOD_S)


@contextmanager
def _quiet_and_quick() -> Iterator[None]:
    """No log line below an error, and a collector that looks rarely."""
    before = gc.get_threshold()
    logging.disable(logging.WARNING)
    gc.freeze()  # what is there already is not looked at again and again
    gc.set_threshold(GARBAGE, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        logging.disable(logging.NOTSET)


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
        cores = int(str(cell.profile.machine.get("cores", GPU_MACHINE_CORES)))
        self._processes = Device(audio_workers_of(cell.settings.router.audio_workers, cores))
        self._cell = cell

    def open(self, path: Path, context: RequestContext, **_: Any) -> nullcontext[SimStream]:
        request, costs = self._cell.requests[context.request_id], self._cell.profile.audio
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

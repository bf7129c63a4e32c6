"""Run a scenario from its first request to its last answer, on a virtual clock.

Routers, `ServePool`, `Members` and `Balancer` are the real code; HTTP, audio decoding, the models
and Ray Serve are replaced by waits from the profile. The figures depend on the seed alone, not on
the machine.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from cluster.common.cores import audio_workers_of
from cluster.common.errors import SplitscribeError
from cluster.common.messages import ROLES, SAMPLE_RATE, WINDOW_SAMPLES, Role
from cluster.planning.devices import Device
from cluster.planning.profile import Profile
from cluster.planning.scenario import Arrival, LoadRequest, Outcome, Scenario, arrivals
from cluster.planning.virtual_time import run_virtually
from cluster.planning.workers import Cell, SimDecoder, SimEncoder, SimWorker
from cluster.serve.app import STATS_PERIOD_S
from cluster.serve.hooks import USUAL_ROWS, USUAL_WINDOW_S
from cluster.serve.model_parts import make_transcriber
from cluster.serve.own_calls import OwnCalls
from cluster.serve.replica_count import Balancer, PoolView, ScalingRules
from cluster.serve.serve_pool import ServePool
from cluster.serve.worker_choice import Members
from router.api.params import TranscriptionParams
from router.audio.windows import Window
from router.http.admission import BYTES_PER_AUDIO_S, Admission
from router.interface import Progress, RequestContext

MOMENT_S = 1.0
GPU_MACHINE_CORES = 16  # if a profile gives none
SILENCE = np.zeros(WINDOW_SAMPLES, np.int16)
SILENCE.flags.writeable = False

USUAL_CALL: dict[Role, float] = {"encoder": USUAL_WINDOW_S, "decoder": 1 / USUAL_ROWS}


def simulate(
    scenario: Scenario, profile: Profile, rows: Sequence[Arrival] | None = None
) -> Outcome:
    """rows: requests that replace those drawn from the scenario's load."""
    logging.disable(logging.WARNING)
    try:
        return run_virtually(_run(scenario, profile, rows))
    finally:
        logging.disable(logging.NOTSET)


async def _run(scenario: Scenario, profile: Profile, rows: Sequence[Arrival] | None) -> Outcome:
    chance = Random(scenario.seed)
    load_chance, cell_chance = Random(chance.getrandbits(64)), Random(chance.getrandbits(64))
    cell = Cell(scenario, profile, cell_chance)
    settings, loop, outcome = scenario.settings, cell.loop, cell.outcome
    if settings.placement == "colocated":
        pools = dict.fromkeys(ROLES, SimPool(ROLES, cell))
    else:
        pools = {role: SimPool((role,), cell) for role in ROLES}
    routers = [SimRouter(cell, pools) for _ in range(settings.router.replicas)]
    keeping = asyncio.create_task(_keep(cell, pools, routers))
    await asyncio.sleep(0)  # so that it runs once even if no request comes
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


async def _keep(cell: Cell, pools: dict[Role, SimPool], routers: list[SimRouter]) -> None:
    """Scale the pools, renew and expire leases, and record a moment each second."""
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
            moment["pending"] = sum(router.pending for router in routers)
            cell.outcome.moments.append(moment)
        await asyncio.sleep(STATS_PERIOD_S)


class SimStream:
    """Replaces `AudioStream`: yields each window once the audio is decoded up to its end."""

    def __init__(self, request: LoadRequest, begun_s: float, spread_s: float, cpu_s: float) -> None:
        self.expected_s = self.duration_s = request.audio_s
        self.decode_s = cpu_s
        self._cuts_s, self._begun_s, self._spread_s = request.cuts_s, begun_s, spread_s

    async def __aiter__(self) -> AsyncIterator[Window]:
        loop, first = asyncio.get_running_loop(), 0
        for index, end_s in enumerate(self._cuts_s):
            found_s = self._begun_s + self._spread_s * end_s / self.duration_s
            if (wait_s := found_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            last = round(end_s * SAMPLE_RATE)
            yield Window(index, first, SILENCE[: max(1, last - first)])
            first = last


class SimRouter:
    """A router without HTTP, which is its own `AudioPool`: a process decodes a whole upload."""

    def __init__(self, cell: Cell, pools: dict[Role, SimPool]) -> None:
        now, settings = cell.clock.monotonic, cell.settings.router
        cores = int(str(cell.profile.machine.get("cores", GPU_MACHINE_CORES)))
        self.pending = 0
        self._admission = Admission(settings.max_pending_audio_s, now)
        self._cell, self._progress, self._cpu = cell, Progress(), Device()
        self._audio_workers = Device(audio_workers_of(settings.audio_workers, cores))
        self._params = TranscriptionParams("whisper-1", "en")
        calls = OwnCalls(now)
        encoders, decoders = (
            ServePool(SimHandle(pools[role], role, calls, cell), role, calls) for role in ROLES
        )
        audio: Any = self
        self._transcriber = make_transcriber(
            cell.settings,
            cell.checkpoint,
            audio,
            encoders,
            decoders,
            clock=cell.clock,
            reuses_kv=False,  # no audio comes twice
        )

    def open(self, upload: Any, _context: RequestContext, **_: Any) -> nullcontext[SimStream]:
        costs = self._cell.profile.router
        spread_s = costs.audio_second_s * upload.audio_s
        cpu_s = costs.audio_request_s + spread_s
        begun_s = self._audio_workers.launch(self._cell.loop.time(), cpu_s) - spread_s
        return nullcontext(SimStream(upload, begun_s, spread_s, cpu_s))

    async def answer(self, request: LoadRequest) -> None:
        latency_s, outcome = math.inf, self._cell.outcome
        self.pending += 1
        try:
            await self._transcribe(request)
            latency_s = self._cell.loop.time() - request.at_s
        except SplitscribeError as error:
            why = f"{error.status} {error.code or type(error).__name__}"
            outcome.failures[request.priority][why] += 1
        self.pending -= 1
        outcome.answers[request.priority].append((request.at_s, request.audio_s, latency_s))

    async def _transcribe(self, request: Any) -> None:
        cell, half_s = self._cell, self._cell.profile.router.request_s / 2
        with ExitStack() as stack:
            share = None
            if request.priority != "bulk":  # bulk work passes no admission and has no deadline
                admitted = self._admission.admit(round(request.audio_s * BYTES_PER_AUDIO_S))
                share = stack.enter_context(admitted)
                share.expect(request.audio_s)
            await self._work(half_s)  # half of it before the answer, half after
            context = RequestContext(
                request.name,
                share,
                math.inf if share is None else cell.settings.router.stall_timeout_s,
                clock=cell.clock,
                progress=self._progress,
                priority=request.priority,
            )
            found = await self._transcriber.transcribe(request, self._params, context)
            if share is not None:
                share.done(found.timings)
            await self._work(half_s)

    async def _work(self, seconds: float) -> None:
        now_s = self._cell.loop.time()
        await asyncio.sleep(self._cpu.launch(now_s, seconds) - now_s)


@dataclass(slots=True, eq=False)
class Replica:
    name: str
    node: str
    roles: Mapping[Role, SimWorker]
    ongoing: int = 0


class SimPool:
    """replicas: all that run. waiting: calls that no worker has taken.

    opened: the replicas that take new calls, a new list at each change; the others end once idle.
    """

    def __init__(self, roles: tuple[Role, ...], cell: Cell) -> None:
        self.name = roles[0] if len(roles) == 1 else "worker"
        self.replicas: list[Replica] = []
        self.opened: list[Replica] = []
        self.waiting = 0
        self.changed = asyncio.Event()
        self._roles, self._cell, self._loop = roles, cell, cell.loop
        self._made = 0
        self._start_s = cell.profile.start_s
        settings = getattr(cell.settings, roles[0])
        self._wanted = settings.replicas  # workers, including starting ones
        self._rules = ScalingRules(
            **cell.settings.scaling.model_dump(),
            min_workers=settings.fewest,
            max_workers=settings.most,
        )
        self._is_scaled = len(roles) == 1 and settings.is_scaled
        for _ in range(self._wanted):
            self._add()

    def scale(self, balancer: Balancer) -> None:
        """Scale by the values that `PoolPolicy` gets from Serve, and end idle closed workers."""
        if not self._is_scaled:
            return
        role, starting = self._roles[0], max(0, self._wanted - len(self.opened))
        closed = [one for one in self.replicas if one not in self.opened]
        for replica in [one for one in closed if not one.ongoing and one.roles[role].is_idle()]:
            self.replicas.remove(replica)
        queued = self.waiting + (0 if self.opened else sum(one.ongoing for one in self.replicas))
        signals: Any = {f"{role}s": tuple(one.roles[role].signals() for one in self.opened)}
        view = PoolView(self._wanted, queued * USUAL_CALL[role], starting, **signals)
        decision = balancer.decide(role, self._rules, view, self._loop.time())
        before, self._wanted = self._wanted, decision.workers
        if self._wanted != before:
            at_s, what = round(self._loop.time(), 3), f"{self.name}s: {before} to {self._wanted}"
            made = {"at_s": at_s, "what": what, "why": decision.reason}
            self._cell.outcome.decisions.append(made)
        for _ in range(self._wanted - before):
            self._loop.call_later(self._start_s, self._add)
        if len(self.opened) > self._wanted:  # starting workers were cancelled first
            busiest = sorted(self.opened, key=lambda one: -one.ongoing)[: self._wanted]
            self.opened = [one for one in self.opened if one in busiest]
            if not self.opened:
                self.changed.clear()

    def _add(self) -> None:
        """Called when a worker has started, which may no longer be wanted."""
        if len(self.opened) >= self._wanted:
            return
        number, device = self._made, Device()
        per_node = self._cell.outcome.scenario.per_node
        name = f"{self.name}-{number}"
        node = f"{self.name}-node-{number // per_node}" if per_node else "node"
        self._made += 1
        kinds: dict[Role, Any] = {"encoder": SimEncoder, "decoder": SimDecoder}
        roles = {role: kinds[role](name, node, self._cell, device) for role in self._roles}
        replica = Replica(name, node, roles)
        self.replicas.append(replica)
        self.opened = [*self.opened, replica]
        self.changed.set()


class SimHandle:
    """Replaces a router's deployment handle and its `LoadAwareRouter`."""

    def __init__(self, pool: SimPool, role: Role, calls: OwnCalls, cell: Cell) -> None:
        self._pool, self._role, self._calls, self._chance = pool, role, calls, cell.random
        self.deployment_id = role
        self._told: list[Replica] = []  # the workers known to the router
        self._known: dict[Hashable, Replica] = {}
        self._members = Members()

    def options(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda request: asyncio.create_task(self._call(request)))

    async def _call(self, request: Any) -> Any:
        pool = self._pool
        pool.waiting += 1
        try:
            while not pool.opened:
                await pool.changed.wait()
        finally:
            pool.waiting -= 1
        replica = self._chosen(request)
        replica.ongoing += 1
        worker = replica.roles[self._role]
        try:
            return replace(await worker.call(request), load=worker.core.load())
        finally:
            replica.ongoing -= 1

    def _chosen(self, request: Any) -> Replica:
        if self._told is not self._pool.opened:
            self._told = self._pool.opened
            known: dict[Hashable, Replica] = {one.name: one for one in self._told}
            for gone in self._known.keys() - known.keys():
                self._calls.forget(gone)
            self._known = known
            self._members = Members({key: one.node for key, one in known.items()})
            self._calls.sizes[self.deployment_id] = len(known)
        return self._known[self._members.choose(request, self._calls, self._chance)[0]]

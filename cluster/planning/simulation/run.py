"""Runs a scenario from its first request to its last answer, on a virtual clock.

One cell: its routers, its pools, and what Serve does once in a while. The same scenario with the
same seed gives the same records, whatever the machine and however fast it is.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

from cluster.messages import Role
from cluster.model.checkpoint import open_checkpoint
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.scenario import Kill, LoadRequest, RackLoss, Scenario, Traffic, arrivals
from cluster.planning.simulation.crew import PERIOD_S, Crew, Scaler
from cluster.planning.simulation.parts import CellParts, Moment, Records, settings_for, surfaces
from cluster.planning.simulation.routers import SimRouter
from cluster.planning.simulation.transfer import Links
from cluster.planning.simulation.transfer import Traffic as LinkTraffic
from cluster.planning.simulation.virtual_time import run_virtually, virtual_clock
from cluster.serve.app import STATS_PERIOD_S
from cluster.settings import BUNDLED_MODEL

MOMENT_S = 1.0
GARBAGE = 200_000  # objects between two looks of Python's collector; they hold few circles

OnProgress = Callable[[float, int], None]  # simulated seconds, requests that have come


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scenario. seconds: simulated, until the last answer."""

    scenario: Scenario
    profile: Profile
    records: Records
    seconds: float
    traffic: dict[tuple[str, str], LinkTraffic]
    worker_seconds: dict[str, float]  # by pool, while they were there


def simulate(
    scenario: Scenario, profile: Profile, on_progress: OnProgress | None = None
) -> Outcome:
    """Run it. Takes as long as the machine needs; nothing waits.

    Raises:
        ConfigurationError: a trace cannot be read, or the bundled tokenizer.
    """
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(BUNDLED_MODEL, weights=False))
    with _quiet_and_quick():
        return run_virtually(_run(scenario, profile, tokenizer, on_progress))


async def _run(
    scenario: Scenario,
    profile: Profile,
    tokenizer: WhisperTokenizer,
    on_progress: OnProgress | None,
) -> Outcome:
    chance = Random(scenario.seed)
    load_chance, cell_chance = Random(chance.getrandbits(64)), Random(chance.getrandbits(64))
    cell = CellParts(
        profile,
        settings_for(profile, scenario.settings),
        virtual_clock(cell_chance),
        cell_chance,
        _links(scenario, profile),
        tokenizer,
        Traffic(),
        *surfaces(profile),
    )
    run = _Run(scenario, cell)
    keeping = asyncio.create_task(run.keep(on_progress))
    await run.send(arrivals(scenario.load, load_chance))
    keeping.cancel()
    seconds = asyncio.get_running_loop().time()
    return Outcome(scenario, profile, run.records, seconds, cell.links.traffic, run.worker_seconds)


def _links(scenario: Scenario, profile: Profile) -> Links:
    cluster, within = scenario.cluster, profile.handoff
    between = within
    if cluster.link_gbit_per_s is not None:
        rate = cluster.link_gbit_per_s * 1e9 / 8
        between = LinkProfile(transport="link", latency_s=cluster.link_latency_s, bytes_per_s=rate)
    return Links(within, between)


class _Run:
    def __init__(self, scenario: Scenario, cell: CellParts) -> None:
        self.records = Records()
        self.worker_seconds: dict[str, float] = {}
        self._scenario = scenario
        self._cell = cell
        self._crew = Crew(cell, scenario.cluster, self.records)
        self._crew.open()
        roles: tuple[Role, ...] = ("encoder", "decoder")
        pools = {role: self._crew.pool_of(role)[1] for role in roles}
        self._routers = [
            SimRouter(
                cell,
                pools,
                self.records,
                colocated=scenario.cluster.placement == "colocated",
                language_known=scenario.load.language_known,
            )
            for _ in range(scenario.cluster.routers)
        ]
        self._scaler = Scaler(self._crew)
        self._busy_before = {"encoder": 0.0, "decoder": 0.0}
        self._loop = asyncio.get_running_loop()

    async def send(self, requests: Iterator[LoadRequest]) -> None:
        """Each request to one of the routers when its time has come, until all are answered."""
        for fault in self._scenario.faults:
            self._loop.call_at(fault.at_s, self._kill, fault)
        for rack in self._scenario.racks:
            self._loop.call_at(rack.at_s, self._lose_rack, rack)
        running: set[asyncio.Task[None]] = set()
        for request in requests:
            wait_s = request.at_s - self._loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self.records.n_requests += 1
            router = self._routers[0]
            if len(self._routers) > 1:
                router = self._cell.random.choice(self._routers)
            task = self._loop.create_task(router.answer(request))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running, return_when=asyncio.ALL_COMPLETED)

    async def keep(self, on_progress: OnProgress | None) -> None:
        """What is done again and again: reports of load, autoscaling, a look at everything."""
        scales, next_moment_s = self._scaler.is_needed, 0.0
        period_s = min(STATS_PERIOD_S, PERIOD_S)
        while True:
            now_s = self._loop.time()
            self._crew.tell_stats()
            for router in self._routers:
                for handle in router.handles.values():
                    handle.tell_stats()
            if scales:
                self._scaler.decide(now_s)
            if now_s >= next_moment_s:
                self._note_moment(now_s)
                next_moment_s += MOMENT_S
                if on_progress is not None:
                    on_progress(now_s, self.records.n_requests)
            await asyncio.sleep(period_s)

    def _kill(self, fault: Kill) -> None:
        self._crew.kill(fault.role, fault.count, self._loop.time())

    def _lose_rack(self, rack: RackLoss) -> None:
        self._crew.lose_rack(rack.share, self._loop.time())

    def _note_moment(self, now_s: float) -> None:
        crew, busy, pages = self._crew, {}, {}
        for role in ("encoder", "decoder"):
            workers = crew.workers(role)
            used = [worker.pages() for worker in workers]
            pages[role] = sum(n for n, _ in used) / max(1, sum(n for _, n in used))
            total = sum(worker.device.busy_s for worker in workers)
            gained = max(0.0, total - self._busy_before[role])
            self._busy_before[role] = total
            busy[role] = min(1.0, gained / MOMENT_S / max(1, len(workers)))
        for name, pool in crew.pools.items():
            there = len(pool.replicas) + crew.starting[name]
            self.worker_seconds[name] = self.worker_seconds.get(name, 0.0) + there * MOMENT_S
        encoders, decoders = crew.workers("encoder"), crew.workers("decoder")
        self.records.moments.append(
            Moment(
                now_s,
                len(encoders),
                len(decoders),
                busy["encoder"],
                busy["decoder"],
                pages["encoder"],
                pages["decoder"],
                sum(worker.queued() for worker in encoders),
                round(sum(worker.queued() for worker in decoders)),
                sum(router.admission.requests for router in self._routers),
            )
        )


@contextmanager
def _quiet_and_quick() -> Iterator[None]:
    """No log line for each window, and a collector that looks rarely."""
    names = ("router", "encoder_worker", "decoder_worker", "cluster")
    levels = {name: logging.getLogger(name).level for name in names}
    before = gc.get_threshold()
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    gc.freeze()  # what is there already is not looked at again and again
    gc.set_threshold(GARBAGE, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

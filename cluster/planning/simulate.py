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
from random import Random

from cluster.common.messages import ROLES
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import BUNDLED_MODEL, Settings
from cluster.planning.crew import Crew
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.report import Moment, Outcome, Records
from cluster.planning.routers import SimRouter
from cluster.planning.scenario import LoadRequest, Scenario, arrivals
from cluster.planning.transfer import Links
from cluster.planning.virtual_time import run_virtually, virtual_clock
from cluster.planning.worker import Cell
from cluster.serve.app import STATS_PERIOD_S

MOMENT_S = 1.0
GARBAGE = 200_000  # objects between two looks of Python's collector; they hold few circles

LOGGED = ("router", "encoder_worker", "decoder_worker", "cluster")
OnProgress = Callable[[float, int], None]  # simulated seconds, requests that have come


def simulate(
    scenario: Scenario, profile: Profile, on_progress: OnProgress = lambda *_: None
) -> Outcome:
    """Run it. Takes as long as the machine needs; nothing waits.

    Raises:
        ConfigurationError: a trace cannot be read, or the bundled tokenizer.
    """
    with _quiet_and_quick():
        return run_virtually(_run(scenario, profile, on_progress))


async def _run(scenario: Scenario, profile: Profile, on_progress: OnProgress) -> Outcome:
    chance = Random(scenario.seed)
    load_chance, cell_chance = Random(chance.getrandbits(64)), Random(chance.getrandbits(64))
    cluster, between = scenario.cluster, profile.handoff
    if cluster.link_gbit_per_s is not None:
        rate, latency_s = cluster.link_gbit_per_s * 1e9 / 8, cluster.link_latency_s
        between = LinkProfile(transport="link", latency_s=latency_s, bytes_per_s=rate)
    tokenizer = WhisperTokenizer.from_checkpoint(open_checkpoint(BUNDLED_MODEL, weights=False))
    links, settings = Links(profile.handoff, between), _resolved(scenario.settings, profile)
    clock = virtual_clock(cell_chance)
    run = _Run(scenario, Cell(profile, settings, clock, cell_chance, links, tokenizer))
    keeping = asyncio.create_task(run.keep(on_progress))
    await run.send(arrivals(scenario.load, load_chance))
    keeping.cancel()
    return Outcome(scenario, profile, run.records, clock.monotonic(), links.traffic)


def _resolved(settings: Settings, profile: Profile) -> Settings:
    """Sizes that are left open, as the profile's device has them."""
    encoder, decoder = settings.encoder, settings.decoder
    sizes = {
        "max_batch": encoder.max_batch or profile.encoder.max_batch,
        "export_windows": encoder.export_windows or profile.encoder.export_windows,
    }
    decoder_sizes = {
        "max_batch": decoder.max_batch or profile.decoder.max_batch,
        "kv_windows": decoder.kv_windows or profile.decoder.kv_windows,
    }
    return settings.model_copy(
        update={
            "encoder": encoder.model_copy(update=sizes),
            "decoder": decoder.model_copy(update=decoder_sizes),
        }
    )


class _Run:
    def __init__(self, scenario: Scenario, cell: Cell) -> None:
        self.records = Records()
        self._scenario = scenario
        self._cell = cell
        self._crew = Crew(cell, scenario.cluster, self.records)
        known = scenario.load.language_known
        self._routers = [
            SimRouter(cell, self._crew.pools, self.records, language_known=known)
            for _ in range(scenario.cluster.routers)
        ]
        self._busy_before = dict.fromkeys(ROLES, 0.0)
        self._loop = asyncio.get_running_loop()

    async def send(self, requests: Iterator[LoadRequest]) -> None:
        """Each request to one of the routers when its time has come, until all are answered."""
        crew, one_router = self._crew, len(self._routers) == 1
        for fault in self._scenario.faults:
            self._loop.call_at(fault.at_s, crew.kill, crew.pools[fault.role], fault.count)
        running: set[asyncio.Task[None]] = set()
        for request in requests:
            if (wait_s := request.at_s - self._loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self.records.n_requests += 1
            router = self._routers[0] if one_router else self._cell.random.choice(self._routers)
            task = self._loop.create_task(router.answer(request))
            running.add(task)
            task.add_done_callback(running.discard)
        while running:
            await asyncio.wait(running)

    async def keep(self, on_progress: OnProgress) -> None:
        """What is done again and again: autoscaling, a look at everything."""
        next_moment_s = 0.0
        while True:
            self._crew.scale()
            now_s = self._loop.time()
            if now_s >= next_moment_s:
                self._note_moment(now_s)
                next_moment_s += MOMENT_S
                on_progress(now_s, self.records.n_requests)
            await asyncio.sleep(STATS_PERIOD_S)

    def _note_moment(self, now_s: float) -> None:
        counts, busy, pages = {}, {}, {}
        for role in ROLES:
            workers = self._crew.workers(role)
            counts[role] = len(workers)
            n_pages = sum(worker.pool.n_pages for worker in workers)
            pages[role] = sum(worker.used_pages() for worker in workers) / max(1, n_pages)
            total_s = sum(worker.device.busy_s for worker in workers)
            gained_s = max(0.0, total_s - self._busy_before[role])
            self._busy_before[role] = total_s
            busy[role] = min(1.0, gained_s / MOMENT_S / max(1, len(workers)))
        pending = sum(router.admission.requests for router in self._routers)
        self.records.moments.append(
            Moment(
                now_s,
                counts["encoder"],
                counts["decoder"],
                busy["encoder"],
                busy["decoder"],
                pages["encoder"],
                pages["decoder"],
                pending,
            )
        )


@contextmanager
def _quiet_and_quick() -> Iterator[None]:
    """No log line for each window, and a collector that looks rarely."""
    loggers = [logging.getLogger(name) for name in LOGGED]
    levels, before = [logger.level for logger in loggers], gc.get_threshold()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    gc.freeze()  # what is there already is not looked at again and again
    gc.set_threshold(GARBAGE, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

"""Runs a scenario from its first request to its last answer, on a virtual clock.

One cell: its routers, its pools, and what Serve does once in a while. A scenario and its seed give
the same records on every machine.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random

from cluster.common.messages import ROLES, Role
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.encoder_context import chosen_context
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import BUNDLED_MODEL, Settings
from cluster.planning.pools import SimPool, make_pools
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.report import Outcome, Records
from cluster.planning.routers import SimRouter
from cluster.planning.scenario import Arrival, Scenario, arrivals
from cluster.planning.virtual_time import run_virtually, virtual_clock
from cluster.planning.worker import Cell, Links
from cluster.serve.app import STATS_PERIOD_S
from cluster.serve.replica_count import Balancer

MOMENT_S = 1.0
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
    scenario: Scenario,
    profile: Profile,
    on_progress: OnProgress,
    rows: Sequence[Arrival] | None,
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

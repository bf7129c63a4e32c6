"""Makes a plan: the cheapest design that keeps the objectives, checked with another seed.

Of each design the fewest workers are found by short simulations: a little above what no cluster can
do without, workers are added until the objectives are kept, and then as many of each role taken
away as can be, by bisection. That more workers keep what fewer keep is assumed. Designs are
searched in the order of what they cost at least, and one whose least is more than what was found
already is not simulated. Split and colocated ones compete apart, so that a plan can say which of
the two is cheaper.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from cluster.common.errors import ConfigurationError
from cluster.common.settings import RouterSettings, Settings
from cluster.planning.design import Design, Found, Order, designs
from cluster.planning.report import at_percentile, percentiles
from cluster.planning.scenario import Cluster, Kill, Load, Scenario, Slo
from cluster.planning.simulate import simulate

SHORTEST_S, LONGEST_S = 20.0, 120.0  # of a short simulation
OBJECTIVES = 12  # it is so many times as long as the loosest objective
START_BUSY = 0.85  # of the first cluster that is tried
GROWTH, CORRECTION = 1.25, 1.03
MOST_STEPS = 8  # of growth; after that a design is given up
PENDING_S = 20.0  # of what all workers do, that may be pending: as configs/SCALE.md advises
FLOOR_REQUESTS, FLOOR_RATE = 300, 0.02  # of what a worker could do: requests are alone
TRIAL_SEED, CHECK_SEED, LOSS_SEED = 1, 1001, 2002
MOST_CORRECTIONS = 6  # of a plan that the check refused


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell, simulated: does it keep the objectives?

    told: the percentiles that were asked for.
    """

    scenario: Scenario
    is_kept: bool
    told: str
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """kept: the cheapest of each design that was simulated, the best one first.

    floor: requests that are alone. check: without the spare nodes. loss: with them, while nodes are
    lost; None of colocated workers, whose requests go to other cells. skipped: designs, with the
    reason why they were not simulated, or that they never kept the objectives.
    """

    kept: list[Found]
    skipped: dict[str, str]
    floor: Trial
    check: Trial
    loss: Trial | None

    @property
    def best(self) -> Found:
        return self.kept[0]

    def figures(self) -> dict[str, Any]:
        """All of them, for plan.json."""
        best, order = self.best, self.best.order
        design, rate, price = best.design, order.load.rate_per_s, best.price
        spare = order.spare_nodes * order.per_node * (best.cells if design.is_split else 1)
        routers, audio_workers = best.front(rate / best.cells)
        cheapest = {one.design.placement: one.price for one in reversed(self.kept)}
        pays = cheapest.get("split", math.inf) < cheapest.get("colocated", math.inf)
        splitting = "pays" if pays else "does not pay"
        return {
            "profile": design.profile().model_dump(
                include={"name", "model", "predicted", "source"}
            ),
            "rate_per_s": round(rate, 4),
            "mean_audio_s": round(best.costs.audio_s, 3),
            "objectives": order.asked,
            "placement": design.placement,
            "handoff": design.handoff,
            "design": str(design),
            "cells": best.cells,
            **{
                f"{role}s": {
                    "device": kind.name,
                    "needed": workers * best.cells,
                    "spare": spare,
                }
                for role, kind, workers in (
                    ("encoder", design.encoder, best.encoders),
                    ("decoder", design.decoder, best.decoders),
                )
            },
            "routers": best.cells * routers,
            "audio_workers_of_each_router": audio_workers,
            "nodes": [asdict(row) for row in best.nodes()],
            "expected": self.check.figures,
            "alone": self.floor.figures,
            "with_a_node_of_each_role_lost": self.loss and self.loss.figures,
            "cost": {
                "dollars_per_hour": price,
                "dollars_per_audio_hour": price / (rate * best.costs.audio_s),
            }
            if order.has_prices
            else None,
            "saturates_at_rate_per_s": best.saturates_at(),
            "found": {
                str(one.design): {"workers": one.workers, "price": one.price} for one in self.kept
            },
            "not_chosen": self.skipped,
            "splitting": splitting if len(order.placements) > 1 else None,
        }


def make_plan(order: Order, tell: Callable[[str], object]) -> Plan:
    """Search, check, and find out what ends next. tell: progress, a line at a time.

    Raises:
        ConfigurationError: no cluster of these nodes keeps the objectives; the message says what a
            request takes that is alone.
    """
    floors, skipped = {design: _floor(order, design, tell) for design in designs(order)}, {}
    possible = [design for design, trial in floors.items() if trial.is_kept]
    if not possible:
        design, trial = min(floors.items(), key=lambda pair: pair[1].figures["p95_s"])
        raise ConfigurationError(
            f"no number of workers keeps {order.asked!r}: a request that is alone takes "
            f"{trial.told} ({design}). Loosen --slo, or give shorter audio, faster nodes or "
            "faster --links"
        )
    for design in floors.keys() - set(possible):
        skipped[str(design)] = f"a request that is alone takes {floors[design].told}"
    kept: list[Found] = []
    for placement in order.placements:
        cheapest = math.inf
        bounds = [Found.least(order, one) for one in possible if one.placement == placement]
        for least in sorted(bounds, key=lambda one: one.price):
            if least.price >= cheapest:
                skipped[str(least.design)] = "its devices alone would cost as much or more"
            elif (found := _fewest(least, tell)) is None:
                skipped[str(least.design)] = "more workers did not help"
            else:
                cheapest = min(cheapest, found.price)
                kept.append(found)
    if not kept:
        raise ConfigurationError(
            f"no cluster of at most {order.most_workers} workers keeps {order.asked!r} at "
            f"{order.load.rate_per_s:g} requests a second: allow more with --max-workers, or "
            "loosen --slo"
        )
    kept.sort(key=lambda one: one.price)
    kept[0], check = _checked(kept[0], tell)
    return Plan(kept, skipped, floors[kept[0].design], check, _loss(kept[0], tell))


def _floor(order: Order, design: Design, tell: Callable[[str], object]) -> Trial:
    """Requests that are alone: no number of workers does better."""
    load, n_workers = order.load, 4 if design.is_split else 1
    found = replace(Found.least(order, design), cells=1, encoders=n_workers, decoders=n_workers)
    rate = FLOOR_RATE / max(found.costs.encode_s + found.costs.decode_s, 1e-3)
    if load.trace is not None:
        changes: dict[str, Any] = {"share": min(1.0, rate / load.rate_per_s)}
    else:
        changes = {"kind": "poisson", "rate_per_s": rate, "seconds": FLOOR_REQUESTS / rate}
    tell(f"{design}: what a request takes that is alone")
    return _try(found, load.model_copy(update=changes), CHECK_SEED)


def _fewest(least: Found, tell: Callable[[str], object]) -> Found | None:
    """Grow until the objectives are kept, then take away; None: they never are."""
    keeps = partial(_keeps, tell=tell)
    found = least.grown(least.dims, 1 / START_BUSY)
    for _ in range(MOST_STEPS):
        if found.workers > least.order.most_workers:
            return None
        if keeps(found):
            break
        found = found.grown(least.dims, GROWTH)
    else:
        return None
    for dim in least.dims:
        sizes = range(getattr(least, dim), getattr(found, dim))
        tried = [found.with_size(dim, size) for size in sizes]
        found = [*tried, found][bisect_left(tried, True, key=keeps)]
    return found


def _keeps(found: Found, tell: Callable[[str], object]) -> bool:
    """By one short simulation of a cell."""
    order = found.order
    seconds = order.trial_requests * found.cells / order.load.rate_per_s
    seconds = min(LONGEST_S, max(SHORTEST_S, seconds))
    trial = _try(found, _load(found, max(seconds, OBJECTIVES * order.loosest_s)), TRIAL_SEED)
    tell(f"{found}: {trial.told}, {'kept' if trial.is_kept else 'missed'}")
    return trial.is_kept


def _load(found: Found, seconds: float) -> Load:
    """Of one cell. A trace is played whole: each cell gets requests by chance."""
    load = found.order.load
    if load.trace is not None:
        return load.model_copy(update={"share": 1 / found.cells})
    return load.model_copy(update={"rate_per_s": load.rate_per_s / found.cells, "seconds": seconds})


def _try(found: Found, load: Load, seed: int, faults: tuple[Kill, ...] = ()) -> Trial:
    """Simulate one cell."""
    order, design, rate = found.order, found.design, load.rate_per_s * load.share
    routers, audio_workers = found.front(rate)
    pending_s = max(PENDING_S, 3 * order.loosest_s) * rate * found.costs.audio_s / routers
    router = RouterSettings(audio_workers=audio_workers, max_pending_audio_s=max(120.0, pending_s))
    scenario = Scenario(
        profile=design.profile().name,
        cluster=Cluster(
            placement=design.placement,
            encoders=found.encoders,
            decoders=found.decoders,
            routers=routers,
            per_node=order.per_node,
            link_gbit_per_s=order.link_gbit_per_s,
        ),
        load=load,
        slo=Slo(latency_s=order.loosest_s, per_audio_s=0.0),
        faults=faults,
        settings=Settings(handoff=design.handoff, router=router),
        seed=seed,
    )
    outcome = simulate(scenario, design.profile())
    latencies, used = outcome.latencies(), outcome.busy()
    seen = {percent: at_percentile(latencies, percent) for percent in order.objectives}
    figures = {
        **percentiles(latencies),
        "failed": sum(map(math.isinf, latencies)),
        **{name: used[name] for name in ("encoder_busy", "decoder_busy")},
        "decisions": [one["what"] for one in outcome.records.decisions],
    }
    is_kept = all(seen[percent] < limit_s for percent, limit_s in order.objectives.items())
    told = ", ".join(f"p{percent:g} {seconds:.3g} s" for percent, seconds in seen.items())
    return Trial(scenario, is_kept, told, figures)


def _checked(found: Found, tell: Callable[[str], object]) -> tuple[Found, Trial]:
    """The long simulation with another seed; workers are added until it is kept."""
    order = found.order
    for _ in range(MOST_CORRECTIONS):
        tell(f"check of {order.check_s:g} s with another seed")
        trial = _try(found, _load(found, order.check_s), CHECK_SEED)
        if trial.is_kept:
            return found, trial
        busier = max(("encoder", "decoder"), key=lambda role: trial.figures[f"{role}_busy"])
        found = found.grown([f"{busier}s"] if found.design.is_split else ["cells"], CORRECTION)
        tell(f"the check missed ({trial.told}): more workers")
    raise ConfigurationError(
        f"short simulations of {found.design} keep {order.asked!r} and longer ones do not, "
        "also with more workers: is the load's peak much above its mean? Loosen --slo or "
        "raise --rate"
    )


def _loss(found: Found, tell: Callable[[str], object]) -> Trial | None:
    """With the spare nodes, while a node of each role is lost, one after the other."""
    order = found.order
    spare = order.spare_nodes * order.per_node
    if not found.design.is_split or not spare:
        return None
    tell(f"{order.check_s:g} s in which a node of each role is lost")
    whole = replace(found, encoders=found.encoders + spare, decoders=found.decoders + spare)
    load, node = _load(found, order.check_s), order.per_node
    faults = (
        Kill(at_s=load.seconds / 3, role="encoder", count=min(node, whole.encoders)),
        Kill(at_s=load.seconds * 2 / 3, role="decoder", count=min(node, whole.decoders)),
    )
    return _try(whole, load, LOSS_SEED, faults)

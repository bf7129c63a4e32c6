"""Find the cheapest design that keeps the objective, and check it with another seed.

Short simulations find the fewest workers of each design: workers are added until the objective is
kept, then removed by bisection. Split and colocated designs are compared separately, so that a plan
can say which is cheaper.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from cluster.common.errors import ConfigurationError
from cluster.common.settings import DecoderSettings, EncoderSettings, Settings
from cluster.planning.design import PERCENT, Design, Order
from cluster.planning.scenario import Scenario, at_percentile, percentiles
from cluster.planning.simulate import simulate

REQUESTS = 8000  # of a short simulation
SHORTEST_S, LONGEST_S = 20.0, 120.0  # bounds for its seconds
OBJECTIVES = 12  # its seconds are at least so many times the objective
GROWTHS = (1.2, 2.4, 4.8)  # factors tried on a design's least workers before it is given up
CORRECTION = 1.03  # factor on the workers after a failed check
TRIAL_SEED, CHECK_SEED = 1, 1001
MOST_CORRECTIONS = 6
MOST_WORKERS = 10_000

Tell = Callable[[str], object]  # progress, a line at a time


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of simulating one cell. told: the objective's percentile, for a person."""

    is_kept: bool
    told: str
    figures: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """kept: the cheapest first. check: of that one, without spare nodes. skipped: the reasons."""

    kept: list[Design]
    skipped: dict[str, str]
    check: Trial

    @property
    def best(self) -> Design:
        return self.kept[0]

    def figures(self) -> dict[str, Any]:
        best, order, costs = self.best, self.best.order, self.best.costs
        rate, router = order.load.rate_per_s, best.router()
        cheapest = {one.placement: one.price for one in reversed(self.kept)}
        pays = cheapest.get("split", math.inf) < cheapest.get("colocated", math.inf)
        splitting = "pays" if pays else "does not pay"
        return {
            "profile": best.profile.origin(),
            "rate_per_s": round(rate, 4),
            "mean_audio_s": round(costs.audio_s, 3),
            "objective": order.asked,
            "design": best.name,
            "cells": best.cells,
            "routers": best.cells * router.replicas,
            "audio_workers_of_each_router": router.audio_workers,
            "router_cores": round(rate * (costs.router_s + costs.audio_cpu_s), 1),
            "nodes": best.nodes(),
            "expected": self.check.figures,
            "price_of_an_hour": best.price,
            "price_of_an_hour_of_audio": best.price / (rate * costs.audio_s),
            "saturates_at_rate_per_s": best.saturates_at(),
            "found": {one.name: {"workers": one.workers, "price": one.price} for one in self.kept},
            "not_chosen": self.skipped,
            "splitting": splitting if len(order.placements) > 1 else None,
        }


def make_plan(order: Order, tell: Tell) -> Plan:
    """Raises ConfigurationError: no cluster keeps the objective."""
    search, skipped = _Search(order, tell), {}
    kept: list[Design] = []
    designs = [
        Design.least(order, placement, encoder, decoder)
        for placement in order.placements
        for encoder, decoder in product(order.kinds, repeat=2)
        if placement == "split" or encoder is decoder
    ]
    for least in sorted(designs, key=lambda one: one.price):
        alike = [one.price for one in kept if one.placement == least.placement]
        if least.price >= min(alike, default=math.inf):
            skipped[least.name] = "its devices alone would cost as much or more"
        elif (found := search.fewest(least)) is None:
            skipped[least.name] = "more workers did not help"
        else:
            kept.append(found)
    if not kept:
        raise ConfigurationError(
            f"no cluster of at most {MOST_WORKERS} workers keeps {order.asked!r} at "
            f"{order.load.rate_per_s:g} requests a second (tried: {search.missed}): loosen --slo, "
            "or give faster nodes or --links"
        )
    while True:  # a design that the check made more expensive may no longer be the cheapest
        kept.sort(key=lambda one: one.price)
        kept[0], check = search.checked(kept[0])
        if kept[0].price <= min(one.price for one in kept):
            return Plan(kept, skipped, check)


class _Search:
    """missed: describes the last simulation that did not keep the objective."""

    def __init__(self, order: Order, tell: Tell) -> None:
        self._order, self._tell = order, tell
        self.missed = "none, they would need more"

    def fewest(self, least: Design) -> Design | None:
        """Return the smallest design that keeps the objective, or None if more workers fail too."""
        grown = [least.grown(least.dims, factor) for factor in GROWTHS]
        able = (one for one in grown if one.workers <= MOST_WORKERS and self._keeps(one))
        if (found := next(able, None)) is None:
            return None
        for dim in least.dims:  # bisection assumes that more workers keep what fewer keep
            sizes = range(getattr(least, dim), getattr(found, dim))
            change: list[dict[str, Any]] = [{dim: size} for size in sizes]
            tried = [replace(found, **one) for one in change]
            found = [*tried, found][bisect_left(tried, True, key=self._keeps)]
        return found

    def checked(self, design: Design) -> tuple[Design, Trial]:
        """Run the long simulation with another seed; add workers until the objective is kept."""
        for _ in range(MOST_CORRECTIONS):
            self._tell(f"check of {self._order.load.seconds:g} s with another seed")
            trial = try_out(design, self._order.load.seconds, CHECK_SEED)
            if trial.is_kept:
                return design, trial
            busier = max(("encoder", "decoder"), key=lambda role: trial.figures[f"{role}_busy"])
            design = design.grown([f"{busier}s"] if design.is_split else ["cells"], CORRECTION)
            self._tell(f"the check missed ({trial.told}): more workers")
        raise ConfigurationError(
            f"short simulations of {design.name} keep {self._order.asked!r} and longer ones do "
            "not, also with more workers: loosen --slo or raise --rate"
        )

    def _keeps(self, design: Design) -> bool:
        order = self._order
        seconds = REQUESTS * design.cells / order.load.rate_per_s
        seconds = min(LONGEST_S, max(SHORTEST_S, seconds))
        trial = try_out(design, max(seconds, OBJECTIVES * order.slo_s), TRIAL_SEED)
        said = f"{design}: {trial.told}"
        self._tell(f"{said}, {'kept' if trial.is_kept else 'missed'}")
        if not trial.is_kept:
            self.missed = said
        return trial.is_kept


def try_out(design: Design, seconds: float, seed: int) -> Trial:
    order, rate = design.order, design.order.load.rate_per_s / design.cells
    scenario = Scenario(
        profile=design.profile.name,
        per_node=order.per_node,
        link_gbit_per_s=order.link_gbit_per_s,
        load=order.load.model_copy(update={"rate_per_s": rate, "seconds": seconds}),
        slo_s=order.slo_s,
        settings=Settings(
            placement=design.placement,
            router=design.router(),
            encoder=EncoderSettings(replicas=design.encoders),
            decoder=DecoderSettings(replicas=design.decoders),
        ),
        seed=seed,
    )
    outcome = simulate(scenario, design.profile)
    latencies, used = outcome.latencies(), outcome.busy()
    seen_s = at_percentile(latencies, PERCENT)
    figures = {
        **percentiles(latencies),
        "failed": sum(map(math.isinf, latencies)),
        **{name: used[name] for name in ("encoder_busy", "decoder_busy")},
    }
    return Trial(seen_s < order.slo_s, f"p{PERCENT} {seen_s:.3g} s", figures)

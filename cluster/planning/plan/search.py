"""Finds the fewest workers of a design that keep the objectives, by short simulations.

It begins a little above what no cluster can do without, adds workers until the objectives are kept,
and then takes away as many of each role as it can, by bisection. That more workers keep what fewer
keep is assumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cluster.messages import ROLES, Role
from cluster.planning.plan.design import (
    CELL_WORKERS,
    Costs,
    Design,
    costs_of,
    least_workers,
    sample,
)
from cluster.planning.plan.loads import CellLoads, trial_seconds
from cluster.planning.plan.order import NodeKind, Order
from cluster.planning.plan.trial import Size, Trial, run_trial, scenario_of

START_BUSY = 0.85  # of the first cluster that is tried
GROWTH = 1.25
MOST_STEPS = 8  # of growth; after that a design is given up
TRIAL_SEED = 1
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """The fewest workers of a design; of one cell, of `cells`. None: no number was found."""

    design: Design
    costs: Costs
    cells: int
    least: Size  # below which no cluster can do the work
    size: Size | None
    trial: Trial | None

    def workers(self) -> int:
        """Of all cells."""
        assert self.size is not None
        split = self.design.placement == "split"
        return self.cells * (self.size.encoders + (self.size.decoders if split else 0))


@dataclass(slots=True)
class Search:
    """Of one order. tried: how many simulations have run; spent_s: what they took here."""

    order: Order
    loads: CellLoads
    tell: Tell
    tried: int = 0
    spent_s: float = 0.0
    _n_requests: int = 0
    _known: dict[tuple[Design, int, Size], Trial] = field(default_factory=dict)

    def least(self, design: Design) -> tuple[Costs, Size]:
        """What a design cannot do without, of all cells together."""
        costs = costs_of(design, sample(self.order.load))
        return costs, Size(*least_workers(design, costs, self.order.load.rate_per_s))

    def fewest(self, design: Design) -> Found:
        """The fewest workers of this design."""
        costs, least = self.least(design)
        if design.placement == "colocated":
            return self._fewest_colocated(design, costs, least)
        cells = math.ceil((least.encoders + least.decoders) / CELL_WORKERS)
        each = Size(math.ceil(least.encoders / cells), math.ceil(least.decoders / cells))
        enough = self._enough(design, costs, cells, each)
        if enough is None:
            return Found(design, costs, cells, least, None, None)
        size = enough
        for role in sorted(ROLES, key=lambda role: -_kind(design, role).dollars):  # the dear first
            size = self._fewest_of(role, design, costs, cells, each, size)
        return Found(design, costs, cells, least, size, self._known[design, cells, size])

    def _fewest_of(
        self, role: Role, design: Design, costs: Costs, cells: int, least: Size, enough: Size
    ) -> Size:
        """As few of one role as will do, with as many of the other as there are."""
        keeps = self._keeps(design, costs, cells)

        def with_so_many(n: int) -> Size:
            return replace(enough, **{f"{role}s": n})

        low, high = getattr(least, f"{role}s"), getattr(enough, f"{role}s")
        return with_so_many(_least_true(low, high, lambda n: keeps(with_so_many(n))))

    def try_size(
        self, design: Design, costs: Costs, cells: int, size: Size, factor: float = 1.0
    ) -> Trial:
        """One short simulation of a cell. factor: of the load."""
        rate = factor * self.order.load.rate_per_s / cells
        seconds = trial_seconds(self.order, rate)
        load = self.loads.load(cells, seconds, TRIAL_SEED, factor)
        scenario = scenario_of(self.order, design, costs, size, load, TRIAL_SEED)
        began_s = time.perf_counter()
        trial = run_trial(self.order, design, scenario)
        self.spent_s += time.perf_counter() - began_s
        self._n_requests += trial.figures["requests"]
        self.tried += 1
        percent = self.order.objectives[-1].percent
        said = "kept" if trial.is_kept else "missed"
        what = f"{size.encoders} + {size.decoders}"
        if design.placement == "colocated":
            what = f"{cells} cells of one"
        self.tell(f"{design}: {what}: p{percent:g} {trial.at(percent):.3g} s, {said}")
        return trial

    def usual_s(self, n_requests: float) -> float:
        """What a simulation of so many requests takes here, by those that have run."""
        return n_requests * self.spent_s / max(1, self._n_requests)

    def _keeps(self, design: Design, costs: Costs, cells: int) -> Callable[[Size], bool]:
        def keeps(size: Size) -> bool:
            key = (design, cells, size)
            if key not in self._known:
                self._known[key] = self.try_size(design, costs, cells, size)
            return self._known[key].is_kept

        return keeps

    def _enough(self, design: Design, costs: Costs, cells: int, least: Size) -> Size | None:
        """Some size that keeps the objectives; the busier role grows more."""
        keeps = self._keeps(design, costs, cells)
        encoders = math.ceil(least.encoders / START_BUSY)
        decoders = math.ceil(least.decoders / START_BUSY)
        for _ in range(MOST_STEPS):
            size = Size(encoders, decoders)
            if cells * (encoders + decoders) > self.order.most_workers:
                return None
            if keeps(size):
                return size
            encoders, decoders = _more(encoders), _more(decoders)
        return None

    def _fewest_colocated(self, design: Design, costs: Costs, least: Size) -> Found:
        """Each worker is a cell, since the server has one colocated worker."""
        one = Size(1, 1)
        known: dict[int, Trial] = {}

        def keeps(cells: int) -> bool:
            if cells not in known:
                known[cells] = self.try_size(design, costs, cells, one)
            return known[cells].is_kept

        cells = math.ceil(least.encoders / START_BUSY)
        for _ in range(MOST_STEPS):
            if cells > self.order.most_workers:
                break
            if keeps(cells):
                fewest = _least_true(least.encoders, cells, keeps)
                return Found(design, costs, fewest, least, one, known[fewest])
            cells = _more(cells)
        return Found(design, costs, cells, least, None, None)


def _kind(design: Design, role: Role) -> NodeKind:
    return design.encoder if role == "encoder" else design.decoder


def _more(n: int) -> int:
    return max(n + 1, math.ceil(GROWTH * n))


def _least_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least n of low to high for which it holds; it holds for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high

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
from typing import Any

from cluster.messages import ROLES, Role
from cluster.planning.plan.design import (
    CELL_WORKERS,
    Costs,
    Design,
    costs_of,
    front_of,
    least_workers,
    sample,
)
from cluster.planning.plan.order import CellLoads, NodeKind, Objective, Order, trial_seconds
from cluster.planning.report import WARM_UP, percentile, summary
from cluster.planning.scenario import Load, Scenario, make_scenario
from cluster.planning.simulation.parts import Records
from cluster.planning.simulation.run import OnProgress, simulate

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


PENDING_S = 20.0  # of what all workers do, that may be pending: as configs/SCALE.md advises


@dataclass(frozen=True, slots=True)
class Size:
    """Workers of one cell. Colocated: encoders are the workers, and decoders the same number."""

    encoders: int
    decoders: int


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one simulation."""

    size: Size
    latencies: list[float]  # in rising order; failed ones are infinite
    objectives: tuple[Objective, ...]
    figures: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def is_kept(self) -> bool:
        return all(self.at(one.percent) < one.seconds for one in self.objectives)

    def at(self, percent: float) -> float:
        return percentile(self.latencies, percent) if self.latencies else math.inf

    @property
    def n_failed(self) -> int:
        return sum(math.isinf(latency) for latency in self.latencies)

    def busy(self, role: str) -> float:
        return float(self.figures["utilisation"].get(f"{role}_busy", 0.0))


def scenario_of(
    order: Order,
    design: Design,
    costs: Costs,
    size: Size,
    load: Load,
    seed: int,
    lost_nodes: bool = False,
) -> Scenario:
    """One cell. lost_nodes: in the middle a node of each role is lost, and started again."""
    split = design.placement == "split"
    workers = size.encoders + (size.decoders if split else 0)
    routers, audio_workers = front_of(costs, load.rate_per_s, workers)
    pending_s = max(PENDING_S, 3 * order.loosest_s) * load.rate_per_s * costs.audio_s / routers
    router: dict[str, Any] = {"audio_workers": audio_workers}
    if load.kind != "trace":
        router["max_pending_audio_s"] = max(120.0, pending_s)
    lost = min(order.per_node, size.encoders)
    faults = [{"at_s": load.seconds / 3, "role": "encoder", "count": lost}]
    if split:
        lost = min(order.per_node, size.decoders)
        faults.append({"at_s": 2 * load.seconds / 3, "role": "decoder", "count": lost})
    return make_scenario(
        {
            "profile": design.profile().name,
            "cluster": {
                "placement": design.placement,
                "encoders": size.encoders,
                "decoders": size.decoders,
                "routers": routers,
                "per_node": order.per_node,
                "link_gbit_per_s": order.link_gbit_per_s,
            },
            "load": load.model_dump(),
            "slo": {"latency_s": order.loosest_s, "per_audio_s": 0.0},
            "faults": faults if lost_nodes else [],
            "settings": {"handoff": design.handoff, "router": router},
            "seed": seed,
        }
    )


def run_trial(
    order: Order,
    design: Design,
    scenario: Scenario,
    on_progress: OnProgress | None = None,
) -> Trial:
    """Simulate one cell."""
    outcome = simulate(scenario, design.profile(), on_progress)
    cluster = scenario.cluster
    decoders = cluster.decoders if cluster.placement == "split" else cluster.encoders
    latencies = latencies_of(outcome.records, WARM_UP * scenario.load.seconds)
    return Trial(
        Size(cluster.encoders, decoders), latencies, order.objectives, summary(outcome, 0.0)
    )


def latencies_of(records: Records, begin_s: float) -> list[float]:
    """Of all requests that came later than `begin_s`, in rising order."""
    found: list[float] = []
    for answers in records.answers.values():
        rows = zip(answers.arrived_s, answers.latency_s, strict=True)
        found += [latency for at_s, latency in rows if at_s >= begin_s]
        found += [math.inf for at_s in answers.failed_at_s if at_s >= begin_s]
    return sorted(found)

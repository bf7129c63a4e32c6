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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.common.errors import ConfigurationError
from cluster.planning.design import Costs, Design, Found, Nodes, Size, designs, front_of
from cluster.planning.order import Order
from cluster.planning.report import PERCENTILES, Outcome, percentile, summary
from cluster.planning.scenario import Load, Scenario, make_scenario
from cluster.planning.simulate import simulate

SHORTEST_S, LONGEST_S = 20.0, 120.0  # of a short simulation
OBJECTIVES = 12  # it is so many times as long as the loosest objective
START_BUSY = 0.85  # of the first cluster that is tried
GROWTH = 1.25
MOST_STEPS = 8  # of growth; after that a design is given up
PENDING_S = 20.0  # of what all workers do, that may be pending: as configs/SCALE.md advises
FLOOR_REQUESTS, FLOOR_RATE = 300, 0.02  # of what a worker could do: requests are alone
FACTORS = (1.1, 1.25, 1.5, 2.0)  # of the load, to find where the objectives end
TRIAL_SEED, CHECK_SEED, LOSS_SEED = 1, 1001, 2002
MOST_CORRECTIONS = 6  # of a plan that the check refused


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell, simulated: does it keep the objectives?"""

    order: Order
    outcome: Outcome = field(repr=False)
    figures: dict[str, Any] = field(repr=False)
    latencies: list[float] = field(repr=False)

    @classmethod
    def run(cls, order: Order, design: Design, scenario: Scenario) -> Trial:
        outcome = simulate(scenario, design.profile())
        return cls(order, outcome, summary(outcome, 0.0), outcome.latencies())

    @property
    def is_kept(self) -> bool:
        return all(self.at(one.percent) < one.seconds for one in self.order.objectives)

    @property
    def n_failed(self) -> int:
        return sum(map(math.isinf, self.latencies))

    def at(self, percent: float) -> float:
        return percentile(self.latencies, percent)

    def told(self) -> str:
        return ", ".join(
            f"p{one.percent:g} {self.at(one.percent):.3g} s" for one in self.order.objectives
        )

    def as_dict(self) -> dict[str, Any]:
        used = self.figures["utilisation"]
        return {
            **{f"p{percent}_s": round(self.at(percent), 4) for percent in PERCENTILES},
            "failed": self.n_failed,
            "encoder_busy": used.get("encoder_busy", 0.0),
            "decoder_busy": used.get("decoder_busy", 0.0),
            "decisions": [one["what"] for one in self.figures["decisions"]],
        }


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan. check: without the spare nodes. loss: with them, while nodes are lost.

    others: the cheapest of each design that was simulated. skipped: designs, with the reason why
    they were not, or why they never kept the objectives. kept_to: the highest multiple of the load
    that was tried and kept the objectives.
    """

    order: Order
    best: Found
    others: tuple[Found, ...]
    skipped: dict[Design, str]
    floor: Trial
    check: Trial
    loss: Trial | None
    kept_to: float


@dataclass(slots=True)
class Search:
    """Of one order. tell: progress, a line at a time."""

    order: Order
    tell: Callable[[str], object]
    skipped: dict[Design, str] = field(default_factory=dict)

    def plan(self) -> Planned:
        """Search, check, and find out what ends next.

        Raises:
            ConfigurationError: no cluster of these nodes keeps the objectives; the message says
                what a request takes that is alone.
        """
        order = self.order
        floors = {design: self._floor(design) for design in designs(order)}
        possible = [design for design, trial in floors.items() if trial.is_kept]
        if not possible:
            last = order.objectives[-1].percent
            design, trial = min(floors.items(), key=lambda pair: pair[1].at(last))
            raise ConfigurationError(
                f"no number of workers keeps {order.asked!r}: a request that is alone takes "
                f"{trial.told()} ({design}). Loosen --slo, or give shorter audio, faster nodes or "
                "faster --links"
            )
        for design in floors.keys() - set(possible):
            self.skipped[design] = f"a request that is alone takes {floors[design].told()}"
        every: list[Found] = []
        for placement in order.placements:
            every += self._cheapest([one for one in possible if one.placement == placement])
        if not every:
            raise ConfigurationError(
                f"no cluster of at most {order.most_workers} workers keeps {order.asked!r} at "
                f"{order.load.rate_per_s:g} requests a second: allow more with --max-workers, or "
                "loosen --slo"
            )
        every.sort(key=self._price)
        best, check = self._checked(every[0])
        loss, floor = self._with_loss(best), floors[best.design]
        kept_to, others = self._headroom(best), tuple(every[1:])
        return Planned(order, best, others, self.skipped, floor, check, loss, kept_to)

    def _price(self, found: Found) -> float:
        return Nodes.of(self.order, found).price(self.order)

    def _floor(self, design: Design) -> Trial:
        """Requests that are alone: no number of workers does better."""
        load, costs = self.order.load, Costs.of(design, self.order.load)
        rate = FLOOR_RATE / max(costs.encode_s + costs.decode_s, 1e-3)
        seconds, n_workers = FLOOR_REQUESTS / rate, 4 if design.is_split else 1
        alone = load.model_copy(
            update={"kind": "poisson", "trace": None, "rate_per_s": rate, "seconds": seconds}
        )
        if load.trace is not None:
            alone = load.model_copy(update={"share": min(1.0, rate / load.rate_per_s)})
        found = Found(design, costs, Size(1, n_workers, n_workers))
        self.tell(f"{design}: what a request takes that is alone")
        return Trial.run(self.order, design, self._scenario(found, alone, CHECK_SEED))

    def _cheapest(self, group: list[Design]) -> list[Found]:
        """Those that keep the objectives, as long as one may still be the cheapest."""
        rate, bounds = self.order.load.rate_per_s, []
        for design in group:
            costs = Costs.of(design, self.order.load)
            bounds.append(Found(design, costs, Size.least(design, costs, rate)))
        kept: list[Found] = []
        for least in sorted(bounds, key=self._price):
            if self._price(least) >= min(map(self._price, kept), default=math.inf):
                self.skipped[least.design] = "its devices alone would cost as much or more"
            elif (found := self._fewest(least)) is not None:
                kept.append(found)
            else:
                self.skipped[least.design] = "more workers did not help"
        return kept

    def _fewest(self, least: Found) -> Found | None:
        """Grow until the objectives are kept, then take away; None: they never are."""
        known: dict[Size, bool] = {}

        def keeps(size: Size) -> bool:
            if size not in known:
                known[size] = self._try(replace(least, size=size)).is_kept
            return known[size]

        design = least.design
        dims = ["encoders", "decoders"] if design.is_split else ["cells"]
        if design.is_split and design.decoder.dollars > design.encoder.dollars:
            dims.reverse()  # the dear ones are taken away first
        size = _grown(least.size, dims, 1 / START_BUSY)
        for _ in range(MOST_STEPS):
            if replace(least, size=size).workers() > self.order.most_workers:
                return None
            if keeps(size):
                break
            size = _grown(size, dims, GROWTH)
        else:
            return None
        for dim in dims:
            low, high = getattr(least.size, dim), getattr(size, dim)
            while low < high:
                middle = (low + high) // 2
                if keeps(replace(size, **{dim: middle})):
                    high = middle
                else:
                    low = middle + 1
            size = replace(size, **{dim: high})
        return replace(least, size=size)

    def _try(self, found: Found, factor: float = 1.0) -> Trial:
        """One short simulation of a cell. factor: of the load."""
        order, size = self.order, found.size
        rate = factor * order.load.rate_per_s / size.cells
        seconds = min(LONGEST_S, max(SHORTEST_S, order.trial_requests / rate))
        load = self._load(size.cells / factor, max(seconds, OBJECTIVES * order.loosest_s))
        trial = Trial.run(order, found.design, self._scenario(found, load, TRIAL_SEED))
        said = "kept" if trial.is_kept else "missed"
        self.tell(f"{found.design}, {size}, {factor:g} of the load: {trial.told()}, {said}")
        return trial

    def _load(self, cells: float, seconds: float) -> Load:
        """Of one cell. A trace is played whole: each cell gets requests by chance."""
        load = self.order.load
        if load.trace is not None:
            return load.model_copy(update={"share": min(1.0, 1 / cells)})
        rate = load.rate_per_s / cells
        return load.model_copy(update={"rate_per_s": rate, "seconds": seconds})

    def _scenario(self, found: Found, load: Load, seed: int, lost: bool = False) -> Scenario:
        """One cell. lost: in its course a node of each role is, and started again."""
        order, design, size = self.order, found.design, found.size
        routers, audio_workers = front_of(found.costs, load.rate_per_s * load.share)
        pending_s = max(PENDING_S, 3 * order.loosest_s) * load.rate_per_s * found.costs.audio_s
        faults = [
            {"at_s": load.seconds * at, "role": role, "count": min(order.per_node, workers)}
            for at, role, workers in (
                (1 / 3, "encoder", size.encoders),
                (2 / 3, "decoder", size.decoders),
            )
        ]
        fields: dict[str, Any] = {
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
            "faults": faults if lost else [],
            "settings": {
                "handoff": design.handoff,
                "router": {
                    "audio_workers": audio_workers,
                    "max_pending_audio_s": max(120.0, pending_s / routers),
                },
            },
            "seed": seed,
        }
        return make_scenario(fields)

    def _checked(self, found: Found) -> tuple[Found, Trial]:
        """The long simulation with another seed; workers are added until it is kept."""
        order = self.order
        for _ in range(MOST_CORRECTIONS):
            self.tell(f"check of {order.check_s:g} s with another seed")
            load = self._load(found.size.cells, order.check_s)
            trial = Trial.run(order, found.design, self._scenario(found, load, CHECK_SEED))
            if trial.is_kept:
                return found, trial
            used = trial.figures["utilisation"]
            dim = "encoders" if used["encoder_busy"] >= used["decoder_busy"] else "decoders"
            dims = [dim] if found.design.is_split else ["cells"]
            found = replace(found, size=_grown(found.size, dims, 1.03))
            self.tell(f"the check missed ({trial.told()}): more workers")
        raise ConfigurationError(
            f"short simulations of {found.design} keep {order.asked!r} and longer ones do not, "
            "also with more workers: is the load's peak much above its mean? Loosen --slo or "
            "raise --rate"
        )

    def _with_loss(self, found: Found) -> Trial | None:
        """With the spare nodes, while a node of each role is lost, one after the other.

        None of colocated workers: a lost cell's requests go to the others.
        """
        order, size = self.order, found.size
        spare = order.spare_nodes * order.per_node
        if not found.design.is_split or not spare:
            return None
        self.tell(f"{order.check_s:g} s in which a node of each role is lost")
        whole = replace(found, size=Size(size.cells, size.encoders + spare, size.decoders + spare))
        load = self._load(size.cells, order.check_s)
        return Trial.run(order, found.design, self._scenario(whole, load, LOSS_SEED, lost=True))

    def _headroom(self, found: Found) -> float:
        """The highest multiple of the load that is kept; of a trace nothing more is known."""
        kept = 1.0
        for factor in FACTORS if self.order.load.trace is None else ():
            if not self._try(found, factor).is_kept:
                break
            kept = factor
        return kept


def _grown(size: Size, dims: list[str], factor: float) -> Size:
    """By this factor, and by one at least where there is more than the least."""
    counts = {dim: getattr(size, dim) for dim in dims}
    return replace(size, **{dim: max(n + 1, math.ceil(factor * n)) for dim, n in counts.items()})

"""Makes a plan: the cheapest design that keeps the objectives, checked with another seed.

Designs are searched in the order of what they cost at least, and one whose least is more than what
was found already is not simulated. Split and colocated designs compete apart, so that a plan can
say which of the two is cheaper and by how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from cluster.errors import ConfigurationError
from cluster.planning.plan.design import Costs, Design, designs
from cluster.planning.plan.nodes import nodes_of
from cluster.planning.plan.order import CellLoads, Order
from cluster.planning.plan.search import Found, Search, Size, Tell, Trial, run_trial, scenario_of
from cluster.planning.scenario import Load, Scenario

CHECK_SEED, LOSS_SEED = 1001, 2002
MOST_CORRECTIONS = 6  # of a plan that the check refused
FLOOR_REQUESTS = 300
FLOOR_RATE = 0.02  # of what one encoder and one decoder could do: requests are alone
FACTORS = (1.1, 1.25, 1.5, 2.0)  # of the load, to find where the objectives end


@dataclass(frozen=True, slots=True)
class Skipped:
    """A design that was not simulated, or that never kept the objectives."""

    design: Design
    why: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan. check: without the spare nodes. loss: with them, while nodes are lost.

    kept_to: the highest multiple of the load at which the objectives were kept, of those tried.
    """

    order: Order
    best: Found
    others: tuple[Found, ...]
    skipped: tuple[Skipped, ...]
    floor: Trial
    check: Trial
    check_scenario: Scenario
    loss: Trial | None
    kept_to: float
    missed_at: float | None
    simulations: int

    @property
    def spare(self) -> int:
        """Workers of each role beside those that are needed."""
        return self.order.spare_nodes * self.order.per_node

    def of(self, placement: str) -> Found | None:
        """The cheapest of a placement; None: none keeps the objectives."""
        found = [one for one in (self.best, *self.others) if one.design.placement == placement]
        return min(found, key=lambda one: price(self.order, one), default=None)


def price(order: Order, found: Found) -> float:
    """Dollars of an hour, or workers where no prices are known; spare nodes included."""
    nodes = nodes_of(order, found)
    if order.has_prices:
        return nodes.dollars_per_hour
    return sum(row.nodes * row.devices for row in nodes.rows)


def make_plan(order: Order, loads: CellLoads, check_s: float, tell: Tell) -> Planned:
    """Search, check, and find out what ends next.

    Raises:
        ConfigurationError: no cluster of these nodes keeps the objectives; the message says what
            a request takes that is alone.
    """
    search = Search(order, loads, tell)
    floors = {design: _floor(search, design) for design in designs(order)}
    possible = {design: trial for design, trial in floors.items() if trial.is_kept}
    if not possible:
        raise ConfigurationError(_no_floor(order, floors))
    skipped = [
        Skipped(design, f"a request that is alone misses the objective: {_times(trial)}")
        for design, trial in floors.items()
        if design not in possible
    ]
    every: list[Found] = []
    for placement in ("colocated", "split"):
        group = [design for design in possible if design.placement == placement]
        found, left_out = _cheapest(search, group)
        every += found
        skipped += left_out
    if not every:
        raise ConfigurationError(
            f"no cluster of at most {order.most_workers} workers keeps {_asked(order)} at "
            f"{order.load.rate_per_s:g} requests a second: allow more with --max-workers, or "
            "loosen --slo"
        )
    every.sort(key=lambda one: price(order, one))
    best, check, scenario = _checked(search, every[0], check_s)
    loss = _with_loss(search, best, check_s) if order.spare_nodes else None
    kept_to, missed_at = _headroom(search, best)
    return Planned(
        order,
        best,
        tuple(every[1:]),
        tuple(skipped),
        floors[best.design],
        check,
        scenario,
        loss,
        kept_to,
        missed_at,
        search.tried,
    )


def _cheapest(search: Search, group: list[Design]) -> tuple[list[Found], list[Skipped]]:
    """Those that keep the objectives, as long as one may still be the cheapest."""
    order = search.order
    bounds = []
    for design in group:
        costs, least = search.least(design)
        bounds.append((_price_of_least(order, design, costs, least), design))
    bounds.sort(key=lambda pair: pair[0])
    found: list[Found] = []
    skipped: list[Skipped] = []
    for bound, design in bounds:
        cheapest = min((price(order, one) for one in found), default=math.inf)
        if bound >= cheapest:
            skipped.append(Skipped(design, "its devices alone would cost as much or more"))
            continue
        one = search.fewest(design)
        if one.size is None:
            skipped.append(Skipped(design, "more workers did not help"))
        else:
            found.append(one)
    return found, skipped


def _price_of_least(order: Order, design: Design, costs: Costs, least: Size) -> float:
    cells = least.encoders if design.placement == "colocated" else 1
    size = Size(1, 1) if design.placement == "colocated" else least
    return price(order, Found(design, costs, cells, least, size, None))


def _floor(search: Search, design: Design) -> Trial:
    """Requests that are alone: no number of workers does better."""
    order = search.order
    costs, _ = search.least(design)
    rate = FLOOR_RATE / max(costs.encode_s + costs.decode_s, 1e-3)
    load = Load(
        rate_per_s=rate,
        seconds=FLOOR_REQUESTS / rate,
        lengths=order.load.lengths,
        language_known=order.load.language_known,
    )
    if order.load.trace is not None:
        share = order.load.rate_per_s / rate
        seconds = min(FLOOR_REQUESTS / rate, order.load.seconds)
        load = search.loads.load(max(1.0, share), seconds, CHECK_SEED)
    workers = 1 if design.placement == "colocated" else 4
    scenario = scenario_of(order, design, costs, Size(workers, workers), load, CHECK_SEED)
    search.tell(f"{design}: what a request takes that is alone")
    return run_trial(order, design, scenario)


def _checked(search: Search, found: Found, seconds: float) -> tuple[Found, Trial, Scenario]:
    """The long simulation with another seed; workers are added until it keeps the objectives."""
    order = search.order
    for _ in range(MOST_CORRECTIONS):
        scenario = _long(search, found, seconds, CHECK_SEED)
        search.tell(f"check of {seconds:g} s with another seed{_usual(search, found, seconds)}")
        trial = run_trial(order, found.design, scenario, _progress(search, seconds))
        if trial.is_kept:
            return replace(found, trial=trial), trial, scenario
        found = _one_more(found, trial)
        search.tell(f"the check missed ({_times(trial)}): more workers")
    raise ConfigurationError(
        f"short simulations of {found.design} keep {_asked(order)} and longer ones do not, also "
        "with more workers: is the load's peak much above its mean? Loosen --slo or raise --rate"
    )


def _one_more(found: Found, trial: Trial) -> Found:
    assert found.size is not None
    if found.design.placement == "colocated":
        return replace(found, cells=found.cells + max(1, found.cells // 30))
    size = found.size
    role = "encoder" if trial.busy("encoder") >= trial.busy("decoder") else "decoder"
    extra = max(1, getattr(size, f"{role}s") // 30)
    encoders = size.encoders + (extra if role == "encoder" else 0)
    decoders = size.decoders + (extra if role == "decoder" else 0)
    return replace(found, size=Size(encoders, decoders))


def _with_loss(search: Search, found: Found, seconds: float) -> Trial | None:
    """With the spare nodes, while a node of each role is lost, one after the other."""
    order, size = search.order, found.size
    assert size is not None
    if found.design.placement == "colocated":
        return None  # a lost cell's requests go to the others: the check without it is the figure
    spare = order.spare_nodes * order.per_node
    whole = replace(found, size=Size(size.encoders + spare, size.decoders + spare))
    usual = _usual(search, found, seconds)
    search.tell(f"{seconds:g} s in which a node of each role is lost{usual}")
    scenario = _long(search, whole, seconds, LOSS_SEED, lost_nodes=True)
    return run_trial(order, found.design, scenario, _progress(search, seconds))


def _long(
    search: Search, found: Found, seconds: float, seed: int, lost_nodes: bool = False
) -> Scenario:
    assert found.size is not None
    load = search.loads.load(found.cells, seconds, seed)
    return scenario_of(search.order, found.design, found.costs, found.size, load, seed, lost_nodes)


def _headroom(search: Search, found: Found) -> tuple[float, float | None]:
    """The highest multiple of the load that is kept, and the lowest one that is not."""
    assert found.size is not None
    kept = 1.0
    for factor in FACTORS:
        search.tell(f"{factor:g} times the load")
        trial = search.try_size(found.design, found.costs, found.cells, found.size, factor)
        if not trial.is_kept:
            return kept, factor
        kept = factor
    return kept, None


def _usual(search: Search, found: Found, seconds: float) -> str:
    """How long a simulation of so many seconds will take."""
    n_requests = seconds * search.order.load.rate_per_s / found.cells
    return f": takes about {search.usual_s(n_requests):.0f} s"


def _progress(search: Search, seconds: float) -> Callable[[float, int], None]:
    told_s = 0.0

    def tell(at_s: float, n_requests: int) -> None:
        nonlocal told_s
        if at_s - told_s >= seconds / 10:
            told_s = at_s
            search.tell(f"second {at_s:.0f} of {seconds:g}, {n_requests} requests")

    return tell


def _no_floor(order: Order, floors: dict[Design, Trial]) -> str:
    percent = order.objectives[-1].percent
    design, trial = min(floors.items(), key=lambda pair: pair[1].at(percent))
    return (
        f"no number of workers keeps {_asked(order)}: a request that is alone takes "
        f"{_times(trial)} ({design}). Loosen --slo, or give shorter audio, faster nodes or "
        "faster --links"
    )


def _times(trial: Trial) -> str:
    return ", ".join(f"p{one.percent:g} {trial.at(one.percent):.3g} s" for one in trial.objectives)


def _asked(order: Order) -> str:
    return "'" + ", ".join(map(str, order.objectives)) + "'"

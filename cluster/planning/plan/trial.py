"""One cluster tried in the simulator: does it keep the objectives?

Latencies are of the requests that came after the first tenth of the time. A request that failed,
or was refused, counts as one that was never answered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from cluster.planning.plan.design import Costs, Design, front_of
from cluster.planning.plan.order import Objective, Order
from cluster.planning.report.summary import WARM_UP, percentile, summary
from cluster.planning.scenario.model import Load, Scenario, make_scenario
from cluster.planning.simulation.records import Records
from cluster.planning.simulation.run import OnProgress, simulate

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

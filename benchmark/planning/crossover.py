"""From how many GPUs on splitting the roles pays: split and colocated, computed and simulated.

    python -m benchmark.planning.crossover [--simulated 2 4] [--device h200] [--out FILE]

For each model, length of the audio, network and number of GPUs: the highest rate of a split
cluster, in the best ratio and with the better hand-over, as a share of what so many colocated
workers do.
What devices and links could do if nothing ever waited is computed for all; for the numbers of GPUs
that `--simulated` names the highest rate that keeps the objective is found by bisection over
simulations, colocated and split. A simulated colocated worker takes turns; a real one may overlap
its roles, at best so well that only the slower one counts, and that ceiling stands beside it. All
times are those of predicted profiles.

Prints a line for each, and one JSON line last. `python -m benchmark.plots` draws the picture.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import versions
from cluster.planning.plan.design import Costs, Design, Payload, costs_of, sample
from cluster.planning.plan.order import CellLoads, NodeKind, Objective, Order, trial_seconds
from cluster.planning.plan.search import Size, run_trial, scenario_of
from cluster.planning.profile import load_profile
from cluster.planning.scenario import Lengths, Load

MODELS = ("large-v3", "large-v3-turbo")
CLIPS: dict[str, tuple[Lengths, float]] = {  # and the limit of their p95
    "5 s": (Lengths(median_s=5.0, sigma=0.4, max_s=30.0), 1.0),
    "27 s": (Lengths(median_s=27.0, sigma=0.1, max_s=30.0), 2.0),
}
STEPS = 6  # of a bisection: 1.5 % of the ceiling
SEED = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """What is compared. profile: its name."""

    profile: str
    clip: str
    link_gbit: float
    requests: int

    def order(self, rate: float) -> Order:
        lengths, limit_s = CLIPS[self.clip]
        kind = NodeKind(self.profile, 1.0, load_profile(self.profile))
        return Order(
            load=Load(rate_per_s=rate, lengths=lengths),
            objectives=(Objective(95, limit_s),),
            kinds=(kind,),
            link_gbit_per_s=self.link_gbit,
            trial_requests=self.requests,
        )


def sizes_of(costs: Costs, gpus: int, link_gbit: float) -> Size:
    """How to divide the GPUs: by what devices and links could do."""
    splits = (Size(n, gpus - n) for n in range(1, gpus))
    return max(splits, key=lambda size: ceiling(costs, size, link_gbit))


def ceiling(costs: Costs, size: Size, link_gbit: float) -> float:
    """Requests per second of split devices and of their links, a port for each, if none waits."""
    ports = min(size.encoders, size.decoders) * link_gbit * 1e9 / 8
    devices = min(size.encoders / costs.encode_s, size.decoders / costs.decode_s)
    return min(devices, ports / costs.kv_bytes)


def highest(setting: Setting, design: Design, costs: Costs, size: Size, most: float) -> float:
    """The highest rate, up to `most`, that keeps the objective; 0: none that was tried."""
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        share = (low + high) / 2
        order = setting.order(share * most)
        with tempfile.TemporaryDirectory() as folder:
            seconds = trial_seconds(order, order.load.rate_per_s)
            load = CellLoads(order, Path(folder)).load(1, seconds, SEED)
            scenario = scenario_of(order, design, costs, size, load, SEED)
            is_kept = run_trial(order, design, scenario).is_kept
        low, high = (share, high) if is_kept else (low, share)
    return low * most


def colocated(setting: Setting, *, is_simulated: bool) -> dict[str, float]:
    """One GPU; more of them do so many times as much. overlapped: only the slower role counts."""
    kind = setting.order(1.0).kinds[0]
    design = Design("colocated", kind, kind)
    costs = costs_of(design, sample(setting.order(1.0).load))
    most = 1 / (costs.encode_s + costs.decode_s)
    rate = highest(setting, design, costs, Size(1, 1), most) if is_simulated else 0.0
    return {"rate": rate, "ceiling": most, "overlapped": 1 / max(costs.encode_s, costs.decode_s)}


def split_ceiling(setting: Setting, gpus: int) -> dict[str, Any]:
    """The best ratio and hand-over, by what devices and links could do."""
    kind = setting.order(1.0).kinds[0]
    best: dict[str, Any] = {"split_ceiling": -1.0}
    payloads: tuple[Payload, ...] = ("cross_kv", "encoder_states")
    for payload in payloads:
        design = Design("split", kind, kind, payload)
        costs = costs_of(design, sample(setting.order(1.0).load))
        size = sizes_of(costs, gpus, setting.link_gbit)
        most = ceiling(costs, size, setting.link_gbit)
        if most > best["split_ceiling"]:
            best = {
                "split_ceiling": most,
                "handoff": payload,
                "encoders": size.encoders,
                "decoders": size.decoders,
            }
    return best


def simulated_split(setting: Setting, found: dict[str, Any]) -> float:
    """The highest rate of that cluster that keeps the objective."""
    kind = setting.order(1.0).kinds[0]
    design = Design("split", kind, kind, found["handoff"])
    costs = costs_of(design, sample(setting.order(1.0).load))
    size = Size(found["encoders"], found["decoders"])
    return highest(setting, design, costs, size, found["split_ceiling"])


def rows_of(model: str, clip: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All networks and numbers of GPUs."""
    name = f"{model}-{args.device}"
    wide = Setting(name, clip, max(args.links), args.requests)
    one = colocated(wide, is_simulated=bool(args.simulated))
    for link in args.links:
        for gpus in args.gpus:
            setting = Setting(name, clip, link, args.requests)
            row: dict[str, Any] = {
                "model": model,
                "clip": clip,
                "link_gbit_per_s": link,
                "gpus": gpus,
                **split_ceiling(setting, gpus),
                "colocated_ceiling": gpus * one["ceiling"],
                "colocated_overlapped_ceiling": gpus * one["overlapped"],
            }
            row["ratio_of_ceilings"] = row["split_ceiling"] / row["colocated_ceiling"]
            if gpus in args.simulated and link == max(args.links):
                row["split_rate"] = simulated_split(setting, row)
                row["colocated_rate"] = gpus * one["rate"]
                row["ratio"] = row["split_rate"] / row["colocated_rate"]
            yield {key: _short(value) for key, value in row.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="h200", help="h100, h200 or l40s")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--clips", nargs="+", default=list(CLIPS), choices=list(CLIPS))
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--links", type=float, nargs="+", default=[10.0, 25.0, 100.0, 400.0])
    parser.add_argument("--simulated", type=int, nargs="*", default=[2, 4], metavar="GPUS")
    parser.add_argument("--requests", type=int, default=2000, help="of each simulation")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    args = parser.parse_args()
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for clip in args.clips:
            for row in rows_of(model, clip, args):
                rows.append(row)
                print(row, flush=True)
    took_s = round(time.perf_counter() - began, 1)
    figures = {"device": args.device, "predicted": True, "versions": versions(), "took_s": took_s}
    print_result("planning.crossover", {**figures, "rows": rows}, args.out)


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

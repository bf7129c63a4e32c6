"""From how many GPUs on splitting the roles pays: goodput split and colocated, simulated.

    python -m benchmark.serving.crossover [--gpus 2 4 8 16] [--links 25 100 400] [--out FILE]

For each model, length of the audio and network it finds by bisection the highest rate that keeps
the objective on so many GPUs of one kind: split, in the ratio of the roles' device seconds and with
the better of both hand-overs, and colocated, each GPU a cell of its own with its share of the
requests. The ceiling is what the devices could do if they never waited. All times are those of
predicted profiles. A simulated colocated worker takes turns; what it would do if its roles
overlapped perfectly is computed, and stands beside it as the ceiling of colocated workers.

Prints a line for each, and one JSON line last.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.shared.command import make_parser, print_result
from benchmark.shared.machine import versions
from cluster.planning.plan.design import Costs, Design, Payload, costs_of, sample
from cluster.planning.plan.loads import CellLoads, trial_seconds
from cluster.planning.plan.order import NodeKind, Objective, Order
from cluster.planning.plan.trial import Size, run_trial, scenario_of
from cluster.planning.profile.shipped import load_profile
from cluster.planning.scenario.model import Lengths, Load

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


def sizes_of(costs: Costs, gpus: int) -> Size:
    """How to divide the GPUs: by what the devices could do."""
    splits = (Size(n, gpus - n) for n in range(1, gpus))
    return max(splits, key=lambda size: ceiling(costs, size))


def ceiling(costs: Costs, size: Size) -> float:
    """Requests per second of split devices that never wait."""
    return min(size.encoders / costs.encode_s, size.decoders / costs.decode_s)


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


def colocated(setting: Setting) -> dict[str, float]:
    """One GPU; more of them do so many times as much."""
    kind = setting.order(1.0).kinds[0]
    design = Design("colocated", kind, kind)
    costs = costs_of(design, sample(setting.order(1.0).load))
    most = 1 / (costs.encode_s + costs.decode_s)
    rate = highest(setting, design, costs, Size(1, 1), most)
    overlapped = rate / most / max(costs.encode_s, costs.decode_s)
    return {"rate": rate, "ceiling": most, "overlapped": overlapped}


def split(setting: Setting, gpus: int) -> dict[str, Any]:
    """The better of both hand-overs."""
    kind = setting.order(1.0).kinds[0]
    best: dict[str, Any] = {"rate": -1.0}
    payloads: tuple[Payload, ...] = ("cross_kv", "encoder_states")
    for payload in payloads:
        design = Design("split", kind, kind, payload)
        costs = costs_of(design, sample(setting.order(1.0).load))
        size = sizes_of(costs, gpus)
        most = ceiling(costs, size)
        rate = highest(setting, design, costs, size, most)
        if rate > best["rate"]:
            best = {
                "rate": rate,
                "ceiling": most,
                "handoff": payload,
                "encoders": size.encoders,
                "decoders": size.decoders,
            }
    return best


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", default="h200", help="h100, h200 or l40s")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--links", type=float, nargs="+", default=[25.0, 100.0, 400.0])
    parser.add_argument("--requests", type=int, default=2000, help="of each simulation")
    parser.add_argument("--out", type=Path, help="write the JSON there")
    args = parser.parse_args()
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for model in args.models:
        for clip in CLIPS:
            alone = colocated(Setting(f"{model}-{args.device}", clip, 400.0, args.requests))
            about = {"model": model, "clip": clip}
            print(about, {name: round(value, 1) for name, value in alone.items()}, flush=True)
            for link in args.links:
                for gpus in args.gpus:
                    setting = Setting(f"{model}-{args.device}", clip, link, args.requests)
                    found = split(setting, gpus)
                    row = {
                        **about,
                        "link_gbit_per_s": link,
                        "gpus": gpus,
                        **{name: _short(value) for name, value in found.items()},
                        "colocated_rate": _short(gpus * alone["rate"]),
                        "colocated_overlapped_rate": _short(gpus * alone["overlapped"]),
                        "ratio": _short(found["rate"] / (gpus * alone["rate"])),
                    }
                    rows.append(row)
                    print(row, flush=True)
    took_s = round(time.perf_counter() - began, 1)
    figures = {"device": args.device, "predicted": True, "versions": versions(), "took_s": took_s}
    print_result("serving.crossover", {**figures, "rows": rows}, args.out)


def _short(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()

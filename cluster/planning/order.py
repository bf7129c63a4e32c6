"""What a plan is asked for: a load, objectives, kinds of nodes with their prices, and a link.

Made from the texts of `splitscribe plan`'s flags. Knows nothing of how a plan is found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from cluster.common.errors import ConfigurationError
from cluster.planning.profile import Profile, load_profile, shipped_profiles
from cluster.planning.scenario import NAMED_LENGTHS, Load, arrivals

Placement = Literal["split", "colocated"]

# Units, the usual one first, and what a number of them is.
RATES = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 1 / 60, "h": 1 / 3600, "hour": 1 / 3600}
LINKS = {"gbps": 1.0, "gbit/s": 1.0, "gb/s": 8.0, "mbps": 1e-3, "mbit/s": 1e-3}
TIMES = {"s": 1.0, "ms": 1e-3, "min": 60.0}


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A device that workers may run on. dollars: an hour of one worker's device; 0: not told."""

    name: str
    dollars: float
    profile: Profile = field(compare=False, repr=False)

    @property
    def on_cpu(self) -> bool:
        return self.profile.machine.get("device") == "cpu"


@dataclass(frozen=True, slots=True)
class Order:
    """All of it.

    objectives: by percentile, the seconds within which so many requests are answered; a failed one
    never is. link_gbit_per_s: between nodes. per_node: devices of a node, each for one worker.
    spare_nodes: of each role, that may be lost while the objectives are kept. cores: of a node.
    trial_requests: that a short simulation should have, for a percentile that holds. check_s: of
    the long one.
    """

    load: Load
    objectives: dict[float, float]
    kinds: tuple[NodeKind, ...]
    link_gbit_per_s: float
    per_node: int = 1
    spare_nodes: int = 1
    cores: int = 8
    router_dollars: float = 0.0
    most_workers: int = 10_000
    placements: tuple[Placement, ...] = ("split", "colocated")
    trial_requests: int = 8000
    check_s: float = 300.0

    @property
    def loosest_s(self) -> float:
        """The longest of the objectives' times."""
        return max(self.objectives.values())

    @property
    def has_prices(self) -> bool:
        return any(kind.dollars for kind in self.kinds)

    @property
    def asked(self) -> str:
        return ", ".join(f"p{percent:g} < {s:g} s" for percent, s in self.objectives.items())


def parse_rate(text: str) -> float:
    """Requests per second: 500/s, 500, 30000/min."""
    said = "--rate is requests per second, minute or hour, such as 500/s, 30000/min or 0.5"
    return _quantity(text, RATES, said)


def parse_objectives(text: str) -> dict[float, float]:
    """Objectives separated by commas: "p95 < 1 s", "p50 < 400ms, p99 < 2 s"."""
    said = "--slo is percentiles of the latency, such as 'p95 < 1 s' or 'p50 < 400 ms, p99 < 2 s'"
    objectives = {}
    for part in text.split(","):
        percent, _, limit = part.lower().replace("<=", "<").partition("<")
        percentile = _quantity(percent.strip().removeprefix("p"), {"": 1.0}, said)
        if not percent.strip().startswith("p") or percentile >= 100:
            raise ConfigurationError(f"{said}, not {part.strip()!r}")
        objectives[percentile] = _quantity(limit, TIMES, said)
    return objectives


def parse_link(text: str) -> float:
    """Gbit per second: 400gbps, 400gbit/s, 50GB/s (bytes), 100."""
    said = "--links is the rate of a node's network, such as 400gbps, 25gbps or 50GB/s (bytes)"
    return _quantity(text, LINKS, said)


def _quantity(text: str, units: dict[str, float], said: str) -> float:
    """A number above 0 with one of the units; the first one where none is there."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/?\s*([a-z/]*)\s*", text.lower())
    value = float(found[1]) * units.get(found[2] or next(iter(units)), 0.0) if found else 0.0
    if not value:
        raise ConfigurationError(f"{said}, not {text.strip()!r}")
    return value


def parse_kinds(text: str, model: str) -> tuple[NodeKind, ...]:
    """Kinds of nodes, "h200:1.9,l40s:0.6": devices, or profiles, with dollars for an hour of one.

    Raises:
        ConfigurationError: there is no such profile, or the profiles are of several models.
    """
    kinds = []
    for part in (one.strip() for one in text.split(",")):
        name, colon, price = part.rpartition(":")
        name, price = (name, price) if colon else (part, "0")
        try:
            dollars = float(price)
        except ValueError as error:
            raise ConfigurationError(
                f"--gpus is DEVICE:DOLLARS_PER_HOUR, separated by commas, such as "
                f"h200:1.9,l40s:0.6, not {part!r}"
            ) from error
        of_model = f"{model}-{name}"
        profile = load_profile(of_model if of_model in shipped_profiles() else name)
        kinds.append(NodeKind(profile.name if Path(name).is_file() else name, dollars, profile))
    first = kinds[0].profile
    for kind in kinds[1:]:
        names = ("model", "shape", "kv_dtype", "page_frames")
        if any(getattr(first, name) != getattr(kind.profile, name) for name in names):
            raise ConfigurationError(
                f"the profiles {first.name} and {kind.profile.name} cannot work together: model, "
                f"shape, number type and page size of the KV must be the same"
            )
    return tuple(kinds)


def make_load(rate: str | None, lengths: str, trace: Path | None) -> Load:
    """Requests at a rate, or those of a trace, which has its own.

    Raises:
        ConfigurationError: none of them was given, or both, or the trace is too short.
    """
    if trace is None:
        if rate is None:
            raise ConfigurationError("how much is to be done? --rate 500/s, or --trace FILE")
        return Load(rate_per_s=parse_rate(rate), lengths=NAMED_LENGTHS[lengths])
    if rate is not None:
        raise ConfigurationError("give --rate or --trace, not both: a trace has its own rate")
    every = list(arrivals(Load(kind="trace", trace=trace, seconds=1e12), Random(0)))
    if len(every) < 2 or every[-1].at_s <= every[0].at_s:
        raise ConfigurationError(f"the trace {trace} has fewer than two requests")
    seconds = every[-1].at_s
    per_s = len(every) / (seconds - every[0].at_s)
    return Load(kind="trace", trace=trace, rate_per_s=per_s, seconds=seconds + 1e-3)

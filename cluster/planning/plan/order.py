"""What a plan is asked for: a load, objectives, kinds of nodes with their prices, and a link.

Made from the texts of `splitscribe plan`'s flags. Knows nothing of how a plan is found.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from cluster.errors import ConfigurationError
from cluster.planning.profile import Profile, load_profile, shipped_profiles
from cluster.planning.scenario import Load, arrivals

Placement = Literal["split", "colocated"]

SECONDS_OF = {"s": 1.0, "sec": 1.0, "second": 1.0, "min": 60.0, "h": 3600.0, "hour": 3600.0}
GBIT_OF = {"gbps": 1.0, "gbit/s": 1.0, "gb/s": 8.0, "mbps": 1e-3, "mbit/s": 1e-3}
NUMBER = r"([0-9]+(?:\.[0-9]+)?)"


@dataclass(frozen=True, slots=True)
class Objective:
    """`percent` of all requests are answered within `seconds`; a failed one never is."""

    percent: float
    seconds: float

    def __str__(self) -> str:
        return f"p{self.percent:g} < {self.seconds:g} s"


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A device that workers may run on. dollars: an hour of one worker's device; 0: not told."""

    name: str
    dollars: float
    profile: Profile = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Order:
    """All of it.

    link_gbit_per_s: between nodes. per_node: devices of a node, each for one worker. spare_nodes:
    of each role, that may be lost while the objectives are kept. cores: of a node. placements:
    which may be planned. trial_requests: that a short simulation should have, for a percentile that
    holds.
    """

    load: Load
    objectives: tuple[Objective, ...]
    kinds: tuple[NodeKind, ...]
    link_gbit_per_s: float
    per_node: int = 1
    spare_nodes: int = 1
    cores: int = 8
    router_dollars: float = 0.0
    most_workers: int = 10_000
    trial_requests: int = 8000
    placements: tuple[Placement, ...] = ("split", "colocated")

    @property
    def loosest_s(self) -> float:
        """The longest of the objectives' times."""
        return max(one.seconds for one in self.objectives)

    @property
    def has_prices(self) -> bool:
        return any(kind.dollars for kind in self.kinds)


def parse_rate(text: str) -> float:
    """Requests per second: 500/s, 500, 30000/min.

    Raises:
        ConfigurationError: it is none.
    """
    found = re.fullmatch(rf"\s*{NUMBER}\s*(?:/\s*([a-z]+))?\s*", text.lower())
    per_s = SECONDS_OF.get(found[2] or "s") if found else None
    if found is None or per_s is None or not float(found[1]):
        raise ConfigurationError(
            f"--rate is requests per second, minute or hour, such as 500/s, 30000/min or 0.5, "
            f"not {text!r}"
        )
    return float(found[1]) / per_s


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Objectives separated by commas: "p95 < 1 s", "p50 < 400ms, p99 < 2 s".

    Raises:
        ConfigurationError: one of them is none.
    """
    objectives = []
    for part in text.split(","):
        found = re.fullmatch(rf"\s*p{NUMBER}\s*<=?\s*{NUMBER}\s*(ms|s|min)?\s*", part.lower())
        percent = float(found[1]) if found else 0.0
        if found is None or not 0 < percent < 100 or not float(found[2]):
            raise ConfigurationError(
                f"--slo is a percentile of the latency and its limit, such as 'p95 < 1 s' or "
                f"'p50 < 400 ms, p99 < 2 s', not {part.strip()!r}"
            )
        unit_s = {"ms": 1e-3, "min": 60.0}.get(found[3] or "s", 1.0)
        objectives.append(Objective(percent, float(found[2]) * unit_s))
    return tuple(objectives)


def parse_link(text: str) -> float:
    """Gbit per second: 400gbps, 400gbit/s, 50GB/s (bytes), 100.

    Raises:
        ConfigurationError: it is none.
    """
    found = re.fullmatch(rf"\s*{NUMBER}\s*([a-z/]+)?\s*", text.lower())
    factor = GBIT_OF.get(found[2] or "gbps") if found else None
    if found is None or factor is None or not float(found[1]):
        raise ConfigurationError(
            f"--links is the rate of a node's network, such as 400gbps, 25gbps or 50GB/s (bytes), "
            f"not {text!r}"
        )
    return float(found[1]) * factor


def parse_kinds(text: str, model: str) -> tuple[NodeKind, ...]:
    """Kinds of nodes, "h200:1.9,l40s:0.6": devices, or profiles, with dollars for an hour of one.

    Raises:
        ConfigurationError: there is no such profile, or the profiles are of several models.
    """
    kinds = []
    for part in (one.strip() for one in text.split(",")):
        name, colon, price = part.rpartition(":")
        if not colon:
            name, price = part, "0"
        try:
            dollars = float(price)
        except ValueError as error:
            raise ConfigurationError(
                f"--gpus is DEVICE:DOLLARS_PER_HOUR, separated by commas, such as "
                f"h200:1.9,l40s:0.6, not {part!r}"
            ) from error
        profile = _profile_of(name, model)
        is_file = name not in shipped_profiles() and f"{model}-{name}" not in shipped_profiles()
        kinds.append(NodeKind(profile.name if is_file else name, dollars, profile))
    first = kinds[0].profile
    for kind in kinds[1:]:
        if not _fit(first, kind.profile):
            raise ConfigurationError(
                f"the profiles {first.name} and {kind.profile.name} cannot work together: model, "
                f"shape, number type and page size of the KV must be the same"
            )
    return tuple(kinds)


def _profile_of(device: str, model: str) -> Profile:
    """The shipped one of this model on this device, else what has this name or path."""
    name = f"{model}-{device}"
    shipped = shipped_profiles()
    if name in shipped:
        return load_profile(name)
    try:
        return load_profile(device)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"no profile is called {name!r} or {device!r}, and it is no file. The package has: "
            f"{', '.join(shipped)}. `splitscribe profile` measures a machine"
        ) from error


def _fit(one: Profile, other: Profile) -> bool:
    names = ("model", "shape", "kv_dtype", "page_frames")
    return all(getattr(one, name) == getattr(other, name) for name in names)


SHORTEST_S, LONGEST_S = 20.0, 120.0  # of a trial
OBJECTIVES = 12  # a trial is so many times as long as the loosest objective


def rate_of_trace(file: Path) -> tuple[float, float]:
    """Requests per second of a trace, and its seconds.

    Raises:
        ConfigurationError: it cannot be read, or is too short.
    """
    requests = list(arrivals(Load(kind="trace", trace=file, seconds=1e12), Random(0)))
    if len(requests) < 2 or requests[-1].at_s <= requests[0].at_s:
        raise ConfigurationError(f"the trace {file} has fewer than two requests")
    seconds = requests[-1].at_s
    return len(requests) / (seconds - requests[0].at_s), seconds


def trial_seconds(order: Order, rate: float) -> float:
    """Of a short simulation."""
    seconds = min(LONGEST_S, max(SHORTEST_S, order.trial_requests / rate))
    return max(seconds, OBJECTIVES * order.loosest_s)


class CellLoads:
    """Loads of one of `cells` cells. folder: where parts of a trace are written."""

    def __init__(self, order: Order, folder: Path) -> None:
        self._order = order
        self._folder = folder

    def load(self, cells: float, seconds: float, seed: int, factor: float = 1.0) -> Load:
        """Of one cell, during so many seconds. factor: of the rate; a trace's gaps shrink."""
        load = self._order.load
        rate = factor * load.rate_per_s / cells
        if load.trace is None:
            return load.model_copy(update={"rate_per_s": rate, "seconds": seconds})
        return self._of_trace(load, cells, min(seconds, load.seconds), seed, factor)

    def _of_trace(self, load: Load, cells: float, seconds: float, seed: int, factor: float) -> Load:
        requests = list(arrivals(load.model_copy(update={"seconds": 1e12}), Random(seed)))
        begin_s = _busiest([one.at_s for one in requests], seconds * factor)
        chance = Random(seed)
        rows: list[dict[str, Any]] = [
            {
                "at_s": (one.at_s - begin_s) / factor,
                "audio_s": one.audio_s,
                "priority": one.priority,
            }
            for one in requests
            if begin_s <= one.at_s <= begin_s + seconds * factor and chance.random() * cells < 1
        ]
        file = self._folder / f"trace-{cells:g}-{seconds:g}-{seed}-{factor:g}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        rate = max(1, len(rows)) / seconds
        return load.model_copy(
            update={"trace": file, "seconds": seconds + 1e-3, "rate_per_s": rate}
        )


def _busiest(times_s: list[float], seconds: float) -> float:
    """Where the stretch of so many seconds begins that has the most requests."""
    first = most = 0
    begin_s = times_s[0] if times_s else 0.0
    for last, at_s in enumerate(times_s):
        while times_s[first] < at_s - seconds:
            first += 1
        if last - first + 1 > most:
            most, begin_s = last - first + 1, times_s[first]
    return begin_s

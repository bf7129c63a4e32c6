"""What a plan is asked for, and designs for it: which role runs where, and what a request costs.

Costs are computed without simulating, and without waiting: no cluster does with fewer workers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from cluster.common.cores import LEAST_AUDIO_WORKERS
from cluster.common.errors import ConfigurationError
from cluster.common.kv.layout import window_bytes
from cluster.planning.profile import Profile, Surface, load_profile, shipped_profiles
from cluster.planning.scenario import TIMESTAMPS, Load, arrivals

SAMPLES = 2000  # requests of the load from which means are taken
ROUTER_BUSY = 0.5  # share of a core that a router, and each audio worker, may be busy
CELL_WORKERS = 400  # of a cell at most; configs/SCALE.md advises up to 500

Placement = Literal["split", "colocated"]

OBJECTIVE = re.compile(r"\s*p([0-9.]+)\s*<=?\s*([0-9.]+)\s*(ms|s|min)?\s*", re.IGNORECASE)
UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0}


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A device that workers may run on. dollars: an hour of one worker's device; 0: not told."""

    name: str
    dollars: float
    profile: Profile = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Order:
    """objectives: by percentile, the seconds within which so many requests are answered. per_node:
    devices of a node, each for one worker. spare_nodes: of each role. trial_requests: of a short
    simulation. check_s: of the long one.
    """

    load: Load
    objectives: dict[float, float]
    kinds: tuple[NodeKind, ...]
    link_gbit_per_s: float
    per_node: int = 1
    spare_nodes: int = 1
    placements: tuple[Placement, ...] = ("split", "colocated")
    trial_requests: int = 8000
    check_s: float = 300.0

    @property
    def loosest_s(self) -> float:
        return max(self.objectives.values())

    @property
    def has_prices(self) -> bool:
        return any(kind.dollars for kind in self.kinds)

    @property
    def asked(self) -> str:
        return ", ".join(f"p{percent:g} < {s:g} s" for percent, s in self.objectives.items())


def parse_objectives(text: str) -> dict[float, float]:
    """Objectives separated by commas: "p95 < 1 s", "p50 < 400ms, p99 < 2 s"."""
    objectives = {}
    for part in text.split(","):
        try:
            percent, limit, unit = OBJECTIVE.fullmatch(part).groups("s")  # type: ignore[union-attr]
            percentile, limit_s = float(percent), float(limit) * UNITS_S[unit.lower()]
        except (AttributeError, ValueError):
            percentile = limit_s = 0.0
        if not 0 < percentile < 100 or not limit_s:
            raise ConfigurationError(
                "--slo is percentiles of the latency, such as 'p95 < 1 s' or 'p50 < 400 ms, "
                f"p99 < 2 s', not {part.strip()!r}"
            )
        objectives[percentile] = limit_s
    return objectives


def parse_kinds(text: str, model: str) -> tuple[NodeKind, ...]:
    """Kinds of nodes, "h200:1.9,l40s:0.6": devices or profiles, with dollars for an hour of one."""
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


@dataclass(frozen=True, slots=True)
class Design:
    """Colocated: encoder and decoder are the same kind, and one worker is both."""

    placement: Placement
    encoder: NodeKind
    decoder: NodeKind

    def __str__(self) -> str:
        if not self.is_split:
            return f"colocated on {self.encoder.name}"
        return f"split, encoders on {self.encoder.name}, decoders on {self.decoder.name}"

    @property
    def is_split(self) -> bool:
        return self.placement == "split"

    def profile(self) -> Profile:
        """The encoder's kind with the decoder's decoder."""
        own, other = self.encoder.profile, self.decoder.profile
        if other is own:
            return own
        changes = {
            "name": f"{own.name}+{other.name}",
            "predicted": own.predicted or other.predicted,
            "source": f"encoder: {own.source}; decoder: {other.source}",
            "decoder": other.decoder,
            "start_s": own.start_s.model_copy(update={"decoder": other.start_s.decoder}),
        }
        return own.model_copy(update=changes)


def designs(order: Order) -> list[Design]:
    found = [Design("colocated", kind, kind) for kind in order.kinds]
    found += [Design("split", one, other) for one in order.kinds for other in order.kinds]
    return [design for design in found if design.placement in order.placements]


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a mean request, in seconds of one device or core, and bytes between nodes."""

    encode_s: float
    decode_s: float
    router_s: float
    audio_cpu_s: float
    kv_bytes: float
    audio_s: float

    @classmethod
    def of(cls, design: Design, load: Load) -> Costs:
        """In the best batches."""
        profile = design.profile()
        step, prefill = Surface(profile.decoder.steps), Surface(profile.decoder.prefills)
        encode = Surface(profile.encoder.points)
        positions, rows = profile.shape.n_audio_ctx, profile.decoder.max_batch
        sizes = range(1, profile.encoder.max_batch + 1)
        endless = load.model_copy(update={"seconds": 1e12})
        requests = list(islice(arrivals(endless, Random(1)), SAMPLES))
        audio_s = sum(request.audio_s for request in requests) / len(requests)
        windows = sum(len(request.cuts_s) for request in requests) / len(requests)
        tokens = load.lengths.tokens_per_s * audio_s + TIMESTAMPS * windows
        prefill_s = windows * prefill.at(rows, positions) / rows
        return cls(
            encode_s=windows * min(encode.at(size, positions) / size for size in sizes),
            decode_s=tokens * step.at(rows, positions) / rows + prefill_s,
            router_s=profile.router.request_s + windows * profile.router.window_s,
            audio_cpu_s=profile.audio.request_s + profile.audio.audio_second_s * audio_s,
            kv_bytes=windows * window_bytes(profile.kv_layout()),
            audio_s=audio_s,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A design with a size: cells, and workers of each. A colocated worker is a cell."""

    order: Order = field(repr=False)
    design: Design
    costs: Costs
    cells: int
    encoders: int = 1
    decoders: int = 1

    @classmethod
    def least(cls, order: Order, design: Design) -> Found:
        """The smallest size at which the queue does not grow for ever."""
        costs, rate = Costs.of(design, order.load), order.load.rate_per_s
        encoders, decoders = rate * costs.encode_s, rate * costs.decode_s
        if not design.is_split:
            return cls(order, design, costs, max(1, math.ceil(encoders + decoders)))
        cells = math.ceil(max(1.0, encoders + decoders) / CELL_WORKERS)
        both = (max(1, math.ceil(one / cells)) for one in (encoders, decoders))
        return cls(order, design, costs, cells, *both)

    @property
    def dims(self) -> list[str]:
        """What may be more or less of it; of two the dear ones first."""
        if not self.design.is_split:
            return ["cells"]
        dims = ["encoders", "decoders"]
        return dims[::-1] if self.design.decoder.dollars > self.design.encoder.dollars else dims

    def grown(self, dims: list[str], factor: float) -> Found:
        """By this factor, and by one at least."""
        sizes: dict[str, Any] = {dim: getattr(self, dim) for dim in dims}
        return replace(self, **{d: max(n + 1, math.ceil(factor * n)) for d, n in sizes.items()})

    def __str__(self) -> str:
        split = f" of {self.encoders} encoders and {self.decoders} decoders"
        return f"{self.design}: {self.cells} cells{split if self.design.is_split else ''}"

    @property
    def workers(self) -> int:
        """Of all cells, without spares."""
        return self.cells * (self.encoders + self.decoders if self.design.is_split else 1)

    def front(self, rate: float) -> tuple[int, int]:
        """Routers for so many requests a second, and audio workers of each."""
        routers = max(1, math.ceil(rate * self.costs.router_s / ROUTER_BUSY))
        audio_workers = math.ceil(rate * self.costs.audio_cpu_s / ROUTER_BUSY / routers)
        return routers, max(LEAST_AUDIO_WORKERS, audio_workers)

    def nodes(self) -> list[dict[str, Any]]:
        """Of each pool in all cells, with the spare ones. dollars: of all of them, an hour."""
        each, design = self.order.per_node, self.design
        pools, cells = [("worker", design.encoder, self.cells)], 1
        if design.is_split:
            pools, cells = [("encoder", design.encoder, self.encoders)], self.cells
            pools += [("decoder", design.decoder, self.decoders)]
        rows: list[dict[str, Any]] = []
        for pool, kind, workers in pools:
            spare = cells * self.order.spare_nodes
            nodes = cells * math.ceil(workers / each) + spare
            row = {"kind": kind.name, "pool": pool, "nodes": nodes, "spare": spare}
            rows.append(row | {"devices": each, "dollars": nodes * each * kind.dollars})
        return rows

    @property
    def price(self) -> float:
        """Dollars of an hour, or devices where no prices are known; spares included."""
        rows = self.nodes()
        if self.order.has_prices:
            return float(sum(row["dollars"] for row in rows))
        return float(sum(row["nodes"] * row["devices"] for row in rows))

    def saturates_at(self) -> dict[str, float]:
        """The rate at which each part has no more, the first to end first. Without spares."""
        costs, order = self.costs, self.order
        routers, audio_workers = self.front(order.load.rate_per_s / self.cells)
        parts = {
            "routers": self.cells * routers / costs.router_s,
            "audio workers": self.cells * routers * audio_workers / costs.audio_cpu_s,
        }
        if self.design.is_split:
            port = order.link_gbit_per_s * 1e9 / 8 / costs.kv_bytes
            for role, workers, seconds in (
                ("encoders", self.cells * self.encoders, costs.encode_s),
                ("decoders", self.cells * self.decoders, costs.decode_s),
            ):
                parts[role] = workers / seconds
                parts[f"links of the {role}' nodes"] = math.ceil(workers / order.per_node) * port
        else:
            parts["workers"] = self.cells / (costs.encode_s + costs.decode_s)
        return dict(sorted(parts.items(), key=lambda pair: pair[1]))

"""The order for a plan, and candidate designs: which role runs on which device, and how many.

Costs of a request are computed without queueing, so they give a lower bound for the workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from cluster.common.cores import LEAST_AUDIO_WORKERS, MOST_AUDIO_WORKERS
from cluster.common.errors import ConfigurationError
from cluster.common.kv.layout import window_bytes
from cluster.common.messages import Role
from cluster.common.settings import RouterSettings
from cluster.planning.profile import Profile, Surface, load_profile, shipped_profiles
from cluster.planning.scenario import TIMESTAMPS, TOKENS_PER_S, Load, arrivals

SAMPLES = 2000  # requests of the load over which costs are averaged
ROUTER_BUSY = 0.5  # share of a core that a router, and each audio worker, may be busy
CELL_WORKERS = 400  # most workers of a cell; configs/SCALE.md advises up to 500
PERCENT = 95  # of the requests must be answered within an order's `slo_s`
PENDING_S = 20.0  # of all workers' work may be pending, as configs/SCALE.md advises
LEAST_PENDING_S = 120.0  # of audio

Placement = Literal["split", "colocated"]


@dataclass(frozen=True, slots=True)
class NodeKind:
    """A device that workers may run on. price: dollars an hour for one device; 1 if not given."""

    name: str
    price: float
    profile: Profile = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Order:
    """per_node: devices of a node, each for one worker. spare_nodes: of each role in each cell."""

    load: Load
    slo_s: float
    kinds: tuple[NodeKind, ...]
    link_gbit_per_s: float
    per_node: int = 1
    spare_nodes: int = 1
    placements: tuple[Placement, ...] = ("split", "colocated")

    @property
    def asked(self) -> str:
        return f"p{PERCENT} < {self.slo_s:g} s"


def parse_kinds(text: str, model: str) -> tuple[NodeKind, ...]:
    """Parse devices or profiles with dollars an hour, such as "h200:1.9,l40s:0.6"."""
    kinds: list[NodeKind] = []
    for part in map(str.strip, text.split(",")):
        name, _, told = part.partition(":")
        try:
            price = float(told or 1)
            if not 0 < price < math.inf:
                raise ValueError(told)
        except ValueError as error:
            raise ConfigurationError(
                f"--gpus is DEVICE:DOLLARS_PER_HOUR, separated by commas, such as "
                f"h200:1.9,l40s:0.6, not {part!r}"
            ) from error
        of_model = f"{model}-{name}"
        profile = load_profile(of_model if of_model in shipped_profiles() else name)
        kinds.append(NodeKind(profile.name if Path(name).is_file() else name, price, profile))
        first = kinds[0].profile
        if profile.kv_layout() != first.kv_layout() or profile.shape != first.shape:
            raise ConfigurationError(
                f"the profiles {first.name} and {profile.name} cannot work together: model, "
                f"shape, number type and page size of the KV must be the same"
            )
    if len({":" in part for part in text.split(",")}) > 1:
        raise ConfigurationError(f"--gpus: give dollars for all of {text}, or for none")
    return tuple(kinds)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a mean request, in seconds of one device or core, and in bytes between nodes."""

    encode_s: float
    decode_s: float
    router_s: float
    audio_cpu_s: float
    kv_bytes: float
    audio_s: float

    @classmethod
    def of(cls, profile: Profile, load: Load) -> Costs:
        step, prefill = Surface(profile.decoder.steps), Surface(profile.decoder.prefills)
        encode, router = Surface(profile.encoder.points), profile.router
        positions, rows = profile.shape.n_audio_ctx, profile.decoder.max_batch
        sizes = range(1, profile.encoder.max_batch + 1)
        endless = load.model_copy(update={"seconds": 1e12})
        requests = list(islice(arrivals(endless, Random(1)), SAMPLES))
        audio_s = sum(request.audio_s for request in requests) / len(requests)
        windows = sum(len(request.cuts_s) for request in requests) / len(requests)
        tokens = TOKENS_PER_S * audio_s + TIMESTAMPS * windows
        prefill_s = windows * prefill.at(rows, positions) / rows
        return cls(
            encode_s=windows * min(encode.at(size, positions) / size for size in sizes),
            decode_s=tokens * step.at(rows, positions) / rows + prefill_s,
            router_s=router.request_s,
            audio_cpu_s=router.audio_request_s + router.audio_second_s * audio_s,
            kv_bytes=windows * window_bytes(profile.kv_layout()),
            audio_s=audio_s,
        )


@dataclass(frozen=True, slots=True)
class Design:
    """encoders, decoders: of each cell. A colocated worker is a cell of its own."""

    order: Order = field(repr=False)
    placement: Placement
    encoder: NodeKind
    decoder: NodeKind
    profile: Profile = field(repr=False)
    costs: Costs
    cells: int = 1
    encoders: int = 1
    decoders: int = 1

    @classmethod
    def least(
        cls, order: Order, placement: Placement, encoder: NodeKind, decoder: NodeKind
    ) -> Design:
        """Return the smallest design whose queues stay bounded."""
        profile = encoder.profile.with_decoder_of(decoder.profile)
        costs, rate = Costs.of(profile, order.load), order.load.rate_per_s
        design = cls(order, placement, encoder, decoder, profile, costs)
        encoders, decoders = rate * costs.encode_s, rate * costs.decode_s
        if not design.is_split:
            return replace(design, cells=max(1, math.ceil(encoders + decoders)))
        cells = math.ceil(max(1.0, encoders + decoders) / CELL_WORKERS)
        encoders, decoders = (max(1, math.ceil(one / cells)) for one in (encoders, decoders))
        return replace(design, cells=cells, encoders=encoders, decoders=decoders)

    @property
    def name(self) -> str:
        if not self.is_split:
            return f"colocated on {self.encoder.name}"
        return f"split, encoders on {self.encoder.name}, decoders on {self.decoder.name}"

    def __str__(self) -> str:
        split = f" of {self.encoders} encoders and {self.decoders} decoders"
        return f"{self.name}: {self.cells} cells{split if self.is_split else ''}"

    @property
    def is_split(self) -> bool:
        return self.placement == "split"

    @property
    def pools(self) -> dict[Role, tuple[NodeKind, int]]:
        return {"encoder": (self.encoder, self.encoders), "decoder": (self.decoder, self.decoders)}

    @property
    def dims(self) -> list[str]:
        """The fields that set its size, the more expensive role first."""
        roles = sorted(self.pools, key=lambda role: -self.pools[role][0].price)
        return [f"{role}s" for role in roles] if self.is_split else ["cells"]

    def grown(self, dims: list[str], factor: float) -> Design:
        sizes: dict[str, Any] = {dim: getattr(self, dim) for dim in dims}
        return replace(self, **{d: max(n + 1, math.ceil(factor * n)) for d, n in sizes.items()})

    @property
    def workers(self) -> int:
        """Of all cells, without spares."""
        return self.cells * (self.encoders + self.decoders if self.is_split else 1)

    def router(self) -> RouterSettings:
        costs, rate = self.costs, self.order.load.rate_per_s / self.cells
        busiest_s = max(costs.router_s, costs.audio_cpu_s / MOST_AUDIO_WORKERS)
        routers = max(1, math.ceil(rate * busiest_s / ROUTER_BUSY))
        audio_workers = math.ceil(rate * costs.audio_cpu_s / ROUTER_BUSY / routers)
        pending_s = max(PENDING_S, 3 * self.order.slo_s) * rate * costs.audio_s / routers
        return RouterSettings(
            replicas=routers,
            audio_workers=max(LEAST_AUDIO_WORKERS, audio_workers),
            max_pending_audio_s=round(max(LEAST_PENDING_S, pending_s), 1),
            node_labels={"pool": "!head"},
        )

    def nodes(self) -> list[dict[str, Any]]:
        """Return a row for each pool of all cells; `nodes` and `price` include the spares."""
        each = self.order.per_node
        pools: list[tuple[str, NodeKind, int, int]] = [("worker", self.encoder, self.cells, 1)]
        if self.is_split:
            pools = [(role, kind, n, self.cells) for role, (kind, n) in self.pools.items()]
        rows: list[dict[str, Any]] = []
        for pool, kind, workers, cells in pools:
            spare = cells * self.order.spare_nodes
            nodes = cells * math.ceil(workers / each) + spare
            row = {"pool": pool, "kind": kind.name, "workers": cells * workers, "nodes": nodes}
            price = nodes * each * kind.price
            rows.append(row | {"spare": spare, "devices": each, "price": price})
        return rows

    @property
    def price(self) -> float:
        """Dollars for an hour, spares included; the number of devices if there are no prices."""
        return float(sum(row["price"] for row in self.nodes()))

    def saturates_at(self) -> dict[str, float]:
        """Return the requests/s at which each part saturates without spares, the lowest first."""
        costs, order, router = self.costs, self.order, self.router()
        routers = self.cells * router.replicas
        parts = {
            "routers": routers / costs.router_s,
            "audio workers": routers * router.audio_workers / costs.audio_cpu_s,
        }
        if self.is_split:
            port = order.link_gbit_per_s * 1e9 / 8 / costs.kv_bytes
            seconds: dict[Role, float] = {"encoder": costs.encode_s, "decoder": costs.decode_s}
            for role, (_, of_cell) in self.pools.items():
                workers = self.cells * of_cell
                parts[f"{role}s"] = workers / seconds[role]
                parts[f"links of the {role}s' nodes"] = math.ceil(workers / order.per_node) * port
        else:
            parts["workers"] = self.cells / (costs.encode_s + costs.decode_s)
        return dict(sorted(parts.items(), key=lambda pair: pair[1]))

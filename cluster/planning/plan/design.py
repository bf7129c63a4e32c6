"""A design: which role runs on which kind of node, how KV travels, and what a request costs there.

The costs are what can be computed from a profile without simulating: device seconds with the best
batches, bytes, and processor time. No cluster does with fewer workers than these say, so they are
where a search begins. Waiting is not in them; that is what the simulator is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from cluster.kv.layout import window_bytes
from cluster.planning.plan.order import NodeKind, Order, Placement
from cluster.planning.profile import Profile
from cluster.planning.scenario import TIMESTAMPS, Load, LoadRequest, arrivals
from cluster.planning.simulation.parts import surfaces

SAMPLES = 2000  # requests of the load from which means are taken
ROUTER_BUSY = 0.5  # share of a core that a router, and each audio worker, may be busy
LEAST_AUDIO_WORKERS = 2
ASKING_S = 0.0025  # of a router's processor for a request, where pools are asked: configs/SCALE.md
ASKED_ABOVE = 16  # workers of a pool
CELL_WORKERS = 400  # of a cell at most; configs/SCALE.md advises up to 500

Payload = Literal["cross_kv", "encoder_states"]


@dataclass(frozen=True, slots=True)
class Design:
    """Colocated: encoder and decoder are the same kind, and one worker is both."""

    placement: Placement
    encoder: NodeKind
    decoder: NodeKind
    handoff: Payload = "cross_kv"

    def __str__(self) -> str:
        if self.placement == "colocated":
            return f"colocated on {self.encoder.name}"
        where = f"encoders on {self.encoder.name}, decoders on {self.decoder.name}"
        if self.encoder.name == self.decoder.name:
            where = f"both on {self.encoder.name}"
        sent = "KV" if self.handoff == "cross_kv" else "encoder states"
        return f"split, {where}, {sent} handed over"

    def profile(self) -> Profile:
        """The encoder's kind with the decoder's decoder."""
        other = self.decoder.profile
        if other is self.encoder.profile:
            return other
        own = self.encoder.profile
        start_s = own.start_s.model_copy(update={"decoder": other.start_s.decoder})
        return own.model_copy(
            update={
                "name": f"{own.name}+{other.name}",
                "predicted": own.predicted or other.predicted,
                "source": f"encoder of {own.name}: {own.source}; decoder of {other.name}: "
                f"{other.source}",
                "decoder": other.decoder,
                "start_s": start_s,
            }
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a mean request, in seconds of one device or core, and bytes between nodes."""

    encode_s: float
    decode_s: float
    router_s: float
    audio_cpu_s: float
    kv_bytes: float
    audio_s: float
    windows: float


def designs(order: Order) -> list[Design]:
    """Every combination: both placements, and of split ones both hand-overs."""
    found = [Design("colocated", kind, kind) for kind in order.kinds]
    for encoder in order.kinds:
        for decoder in order.kinds:
            payloads: tuple[Payload, ...] = ("cross_kv",)
            if decoder.profile.decoder.projection_s:
                payloads = ("cross_kv", "encoder_states")
            found += [Design("split", encoder, decoder, payload) for payload in payloads]
    return [design for design in found if design.placement in order.placements]


def sample(load: Load) -> list[LoadRequest]:
    """Some requests of the load."""
    requests = []
    for request in arrivals(load.model_copy(update={"seconds": 1e9}), Random(1)):
        requests.append(request)
        if len(requests) == SAMPLES:
            break
    return requests


def costs_of(design: Design, requests: Sequence[LoadRequest]) -> Costs:
    """What a mean request of these takes, in the best batches."""
    profile = design.profile()
    encode, step, prefill = surfaces(profile)
    positions, rows = profile.shape.n_audio_ctx, profile.decoder.max_batch
    sizes = range(1, profile.encoder.max_batch + 1)
    window_encode_s = min(encode.at(size, positions) / size for size in sizes)
    row_s, prompt_s = step.at(rows, positions) / rows, prefill.at(rows, positions) / rows
    windows = tokens = 0.0
    for request in requests:
        windows += len(request.cuts_s)
        said = request.tokens_per_s * request.audio_s
        tokens += said + TIMESTAMPS * len(request.cuts_s)
    n = len(requests)
    windows, tokens = windows / n, tokens / n
    audio_s = sum(request.audio_s for request in requests) / n
    layout = profile.kv_layout() if design.handoff == "cross_kv" else profile.states_layout()
    projection_s = profile.decoder.projection_s if design.handoff == "encoder_states" else 0.0
    return Costs(
        encode_s=windows * window_encode_s,
        decode_s=tokens * row_s + windows * (prompt_s + projection_s),
        router_s=profile.router.request_s + windows * profile.router.window_s,
        audio_cpu_s=profile.audio.request_s + profile.audio.audio_second_s * audio_s,
        kv_bytes=windows * window_bytes(layout),
        audio_s=audio_s,
        windows=windows,
    )


def least_workers(design: Design, costs: Costs, rate: float) -> tuple[int, int]:
    """Encoders and decoders below which the queue grows for ever; colocated: the sum, twice."""
    if design.placement == "colocated":
        both = max(1, math.ceil(rate * (costs.encode_s + costs.decode_s)))
        return both, both
    return max(1, math.ceil(rate * costs.encode_s)), max(1, math.ceil(rate * costs.decode_s))


def front_of(costs: Costs, rate: float, workers: int) -> tuple[int, int]:
    """Routers, and audio workers of each."""
    router_s = costs.router_s + (ASKING_S if workers > ASKED_ABOVE else 0.0)
    routers = max(1, math.ceil(rate * router_s / ROUTER_BUSY))
    audio_workers = math.ceil(rate * costs.audio_cpu_s / ROUTER_BUSY / routers)
    return routers, max(LEAST_AUDIO_WORKERS, audio_workers)

"""What a plan says: one JSON object of figures, and the lines that people read first.

The load at which each part has no more is computed from the profile; latencies and the busy shares
of workers are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cluster.planning.design import Found, Nodes
from cluster.planning.order import Order
from cluster.planning.plan import Planned
from cluster.planning.report import PERCENTILES


def capacities(found: Found, order: Order) -> dict[str, float]:
    """The rate at which each part has no more, the first to end first. Without spares."""
    costs, size, nodes = found.costs, found.size, Nodes.of(order, found)
    parts = {
        "routers": nodes.routers / costs.router_s,
        "audio workers": nodes.routers * nodes.audio_workers / costs.audio_cpu_s,
    }
    if found.design.is_split:
        encoders, decoders = size.cells * size.encoders, size.cells * size.decoders
        port = order.link_gbit_per_s * 1e9 / 8 / costs.kv_bytes
        parts |= {
            "encoders": encoders / costs.encode_s,
            "decoders": decoders / costs.decode_s,
            "links of the encoders' nodes": math.ceil(encoders / order.per_node) * port,
            "links of the decoders' nodes": math.ceil(decoders / order.per_node) * port,
        }
    else:
        parts["workers"] = size.cells / (costs.encode_s + costs.decode_s)
    return dict(sorted(parts.items(), key=lambda pair: pair[1]))


def splitting(plan: Planned) -> str:
    """Whether it pays, in a sentence."""
    order, cheapest = plan.order, {}
    for found in (*plan.others, plan.best):
        cheapest[found.design.placement] = found
    if len(order.placements) == 1:
        return f"Only {order.placements[0]} clusters were looked at."
    if "split" not in cheapest:
        return "Splitting does not pay: no split cluster keeps the objectives."
    if "colocated" not in cheapest:
        return "Splitting is needed: no colocated workers keep the objectives."
    together = cheapest["colocated"]
    apart, one = (Nodes.of(order, found).price(order) for found in (cheapest["split"], together))
    busier_s = max(together.costs.encode_s, together.costs.decode_s)
    unit = "dollars an hour" if order.has_prices else "workers"
    overlapped = math.ceil(order.load.rate_per_s * busier_s)
    return (
        f"Splitting {'pays' if apart < one else 'does not pay here'}: {apart:.4g} {unit} split, "
        f"{one:.4g} colocated, spares included. A simulated colocated worker takes turns; if it "
        f"overlapped its roles perfectly, {overlapped} in place of {together.size.cells} might do."
    )


def figures_of(plan: Planned, run_time_s: float) -> dict[str, Any]:
    """All figures, for plan.json."""
    order, best = plan.order, plan.best
    design, size, costs, nodes = best.design, best.size, best.costs, Nodes.of(order, best)
    rate, price = order.load.rate_per_s, nodes.price(order)
    spare = order.spare_nodes * order.per_node * (size.cells if design.is_split else 1)
    cost = {"dollars_per_hour": price, "dollars_per_audio_hour": price / (rate * costs.audio_s)}
    return {
        "profile": design.profile().model_dump(include={"name", "model", "predicted", "source"}),
        "rate_per_s": round(rate, 4),
        "mean_audio_s": round(costs.audio_s, 3),
        "objectives": [str(one) for one in order.objectives],
        "placement": design.placement,
        "handoff": design.handoff,
        "cells": size.cells,
        "encoders": {
            "device": design.encoder.name,
            "needed": size.encoders * size.cells,
            "spare": spare,
        },
        "decoders": {
            "device": design.decoder.name,
            "needed": size.decoders * size.cells,
            "spare": spare,
        },
        "routers": nodes.routers,
        "audio_workers_of_each_router": nodes.audio_workers,
        "nodes": nodes.as_dicts(),
        "expected": plan.check.as_dict(),
        "alone": plan.floor.as_dict(),
        "with_a_node_of_each_role_lost": plan.loss and plan.loss.as_dict(),
        "cost": cost if order.has_prices else None,
        "saturates_at_rate_per_s": capacities(best, order),
        "objectives_kept_up_to_rate_per_s": round(plan.kept_to * rate, 2),
        "others": {str(one.design): one.workers() for one in plan.others},
        "not_chosen": {str(design): why for design, why in plan.skipped.items()},
        "splitting": splitting(plan),
        "run_time_s": round(run_time_s, 1),
    }


def lines_of(plan: Planned, figures: dict[str, Any]) -> Iterator[str]:
    """For the terminal."""
    order, design = plan.order, plan.best.design
    yield str(design.profile())
    yield (
        f"plan for {order.load.rate_per_s:g} requests/s of {figures['mean_audio_s']:g} s each, "
        f"{order.asked}"
    )
    cells = figures["cells"]
    yield f"{design}, {cells} cell{'s' if cells > 1 else ''}"
    for row in figures["nodes"]:
        runs = f"{row['devices']} {row['pool']}s each" if row["devices"] else "routers"
        yield f"  {row['nodes']} x {row['kind']}: {runs}, {row['spare']} of them spare"
    yield (
        f"  {figures['routers']} routers with {figures['audio_workers_of_each_router']} audio "
        "workers each, and Serve's proxy on each of their nodes"
    )
    expected = figures["expected"]
    yield f"expected, without the spares: {_times(expected)}"
    encoders, decoders = expected["encoder_busy"], expected["decoder_busy"]
    yield f"  busy: encoders {encoders:.0%}, decoders {decoders:.0%}"
    yield f"a request that is alone: {_times(figures['alone'])}"
    if (loss := figures["with_a_node_of_each_role_lost"]) is not None:
        yield f"while a node of each role is lost: {_times(loss)}"
    if (cost := figures["cost"]) is not None:
        yield (
            f"cost: {cost['dollars_per_hour']:.4g} dollars an hour, "
            f"{cost['dollars_per_audio_hour']:.3g} for an hour of audio"
        )
    ends = [
        f"{what} saturate at {at:.4g}" for what, at in figures["saturates_at_rate_per_s"].items()
    ]
    yield (
        f"objectives kept up to {figures['objectives_kept_up_to_rate_per_s']:g} requests/s; "
        f"{ends[0]}, then {ends[1]}"
    )
    yield from (f"also found: {what}: {n} workers" for what, n in figures["others"].items())
    yield from (f"not chosen: {what}: {why}" for what, why in figures["not_chosen"].items())
    yield figures["splitting"]


def _times(told: dict[str, Any]) -> str:
    times = ", ".join(f"p{percent} {told[f'p{percent}_s']:.3g} s" for percent in PERCENTILES)
    return f"{times}, {told['failed']} failed"

"""What a plan says: one JSON object of figures, and the lines that people read first.

Utilisation of routers, audio workers and links, and the load at which each part has no more, are
computed from the profile; latencies and the busy shares of workers are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cluster.planning.plan.nodes import nodes_of
from cluster.planning.plan.order import Order
from cluster.planning.plan.planner import Planned, price
from cluster.planning.plan.search import Found, Trial

PERCENTILES = (50, 95, 99)
GBIT = 1e9 / 8


def figures_of(plan: Planned, run_time_s: float) -> dict[str, Any]:
    """All figures."""
    order, best = plan.order, plan.best
    nodes = nodes_of(order, best)
    profile = best.design.profile()
    rate = order.load.rate_per_s
    per_hour = order.load.rate_per_s * best.costs.audio_s
    dollars = nodes.dollars_per_hour
    return {
        "profile": {
            "name": profile.name,
            "model": profile.model,
            "predicted": profile.predicted,
            "source": profile.source,
        },
        "rate_per_s": round(rate, 4),
        "mean_audio_s": round(best.costs.audio_s, 3),
        "objectives": [str(one) for one in order.objectives],
        "placement": best.design.placement,
        "handoff": best.design.handoff,
        "cells": best.cells,
        "encoders": {"device": best.design.encoder.name, **_workers(best, "encoders", plan)},
        "decoders": {"device": best.design.decoder.name, **_workers(best, "decoders", plan)},
        "routers": nodes.routers,
        "audio_workers_of_each_router": nodes.audio_workers,
        "proxies": nodes.proxies,
        "nodes": [row.as_dict() for row in nodes.rows],
        "expected": _expected(plan.check, best, order),
        "alone": _latencies(plan.floor),
        "with_a_node_of_each_role_lost": None if plan.loss is None else _loss(plan.loss),
        "cost": {
            "dollars_per_hour": round(dollars, 2),
            "dollars_per_audio_hour": round(dollars / per_hour, 6),
        }
        if order.has_prices
        else None,
        "saturates": [
            {"what": what, "at_rate_per_s": round(at, 2)} for what, at in capacities(best, order)
        ],
        "objectives_kept_up_to_rate_per_s": round(plan.kept_to * rate, 2),
        "objectives_missed_at_rate_per_s": plan.missed_at and round(plan.missed_at * rate, 2),
        "others": [_other(one, order) for one in plan.others],
        "not_chosen": [{"design": str(one.design), "why": one.why} for one in plan.skipped],
        "splitting": splitting(plan),
        "simulations": plan.simulations,
        "run_time_s": round(run_time_s, 1),
    }


def capacities(found: Found, order: Order) -> list[tuple[str, float]]:
    """Parts, and the rate at which each has no more, the first to end first. Without spares."""
    assert found.size is not None
    costs, size, cells = found.costs, found.size, found.cells
    nodes = nodes_of(order, found)
    parts = [
        ("routers", nodes.routers / costs.router_s),
        ("audio workers", nodes.routers * nodes.audio_workers / costs.audio_cpu_s),
    ]
    if found.design.placement == "colocated":
        parts.append(("workers", cells / (costs.encode_s + costs.decode_s)))
    else:
        encoder_nodes = math.ceil(size.encoders / order.per_node)
        decoder_nodes = math.ceil(size.decoders / order.per_node)
        link = order.link_gbit_per_s * GBIT * cells
        parts += [
            ("encoders", cells * size.encoders / costs.encode_s),
            ("decoders", cells * size.decoders / costs.decode_s),
            ("links of the encoders' nodes", encoder_nodes * link / costs.kv_bytes),
            ("links of the decoders' nodes", decoder_nodes * link / costs.kv_bytes),
        ]
    return sorted(parts, key=lambda pair: pair[1])


def splitting(plan: Planned) -> str:
    """Whether it pays, in a sentence."""
    order = plan.order
    split, together = plan.of("split"), plan.of("colocated")
    unit = "dollars an hour" if order.has_prices else "workers"
    if len(order.placements) == 1:
        return f"Only {order.placements[0]} clusters were looked at."
    if split is None:
        return "Splitting does not pay: no split cluster keeps the objectives."
    if together is None:
        return "Splitting is needed: no colocated workers keep the objectives."
    apart, one = price(order, split), price(order, together)
    overlapped = math.ceil(
        order.load.rate_per_s * max(together.costs.encode_s, together.costs.decode_s)
    )
    about = (
        f"{apart:.4g} {unit} split, {one:.4g} colocated, spares included. A simulated colocated "
        f"worker takes turns; if it overlapped its roles perfectly, {overlapped} in place of "
        f"{together.cells} might do"
    )
    if apart < one:
        return f"Splitting pays: {about}."
    return f"Splitting does not pay here: {about}."


def lines_of(figures: dict[str, Any]) -> Iterator[str]:
    """For the terminal."""
    profile, expected = figures["profile"], figures["expected"]
    kind = "predicted, not measured" if profile["predicted"] else "measured"
    yield f"profile {profile['name']} ({kind}), model {profile['model']}"
    yield (
        f"plan for {figures['rate_per_s']:g} requests/s of {figures['mean_audio_s']:g} s each, "
        f"{', '.join(figures['objectives'])}"
    )
    sent = "KV" if figures["handoff"] == "cross_kv" else "encoder states"
    handed = f", {sent} handed over" if figures["placement"] == "split" else ""
    cells = f", {figures['cells']} cells" if figures["cells"] > 1 else ""
    yield f"placement: {figures['placement']}{handed}{cells}"
    for row in figures["nodes"]:
        spare = f", {row['spare']} of them spare" if row["spare"] else ""
        yield f"  {row['nodes']} x {row['kind']}: {row['runs']}{spare}"
    yield (
        f"  routers: {figures['routers']}, with {figures['audio_workers_of_each_router']} audio "
        f"workers each; proxies: {figures['proxies']}"
    )
    yield f"expected, without the spares: {_times(expected)}"
    yield (
        f"  busy: encoders {expected['encoder_busy']:.0%}, decoders "
        f"{expected['decoder_busy']:.0%}, routers {expected['router_busy']:.0%}"
        + (f", links {expected['link_busy']:.0%}" if "link_busy" in expected else "")
    )
    yield f"a request that is alone: {_times(figures['alone'])}"
    if (loss := figures["with_a_node_of_each_role_lost"]) is not None:
        yield f"while a node of each role is lost: {_times(loss)}, {loss['failed']} failed"
    if (cost := figures["cost"]) is not None:
        yield (
            f"cost: {cost['dollars_per_hour']:g} dollars an hour, "
            f"{cost['dollars_per_audio_hour']:.3g} for an hour of audio"
        )
    first, second = figures["saturates"][:2]
    missed = figures["objectives_missed_at_rate_per_s"]
    end = f", missed at {missed:g}" if missed else ""
    yield (
        f"objectives kept up to {figures['objectives_kept_up_to_rate_per_s']:g} requests/s{end}; "
        f"{first['what']} saturate at {first['at_rate_per_s']:g}, then {second['what']} at "
        f"{second['at_rate_per_s']:g}"
    )
    for other in figures["others"]:
        yield f"also found: {other['design']}: {other['workers']} workers, {other['price']}"
    for other in figures["not_chosen"]:
        yield f"not simulated: {other['design']}: {other['why']}"
    yield figures["splitting"]


def _workers(found: Found, role: str, plan: Planned) -> dict[str, int]:
    assert found.size is not None
    split = found.design.placement == "split"
    needed = getattr(found.size, role) * found.cells
    return {"needed": needed, "spare": plan.spare * (found.cells if split else 1)}


def _latencies(trial: Trial) -> dict[str, float]:
    return {f"p{percent}_s": round(trial.at(percent), 4) for percent in PERCENTILES}


def _expected(trial: Trial, found: Found, order: Order) -> dict[str, Any]:
    """Of the check. link_busy: of the busier end."""
    rate = order.load.rate_per_s
    parts = dict(capacities(found, order))
    links = [at for what, at in parts.items() if what.startswith("links")]
    shares = {"link_busy": round(rate / min(links), 4)} if links else {}
    return {
        **_latencies(trial),
        "failed": trial.n_failed,
        "encoder_busy": trial.busy("encoder"),
        "decoder_busy": trial.busy("decoder"),
        "router_busy": round(rate / parts["routers"], 4),
        "audio_worker_busy": round(rate / parts["audio workers"], 4),
        **shares,
        "simulated_s": trial.figures["simulated_s"],
        "requests": trial.figures["requests"] * found.cells,
    }


def _loss(trial: Trial) -> dict[str, Any]:
    return {
        **_latencies(trial),
        "failed": trial.n_failed,
        "keeps_the_objectives": trial.is_kept,
        "what": [one["what"] for one in trial.figures["decisions"]],
    }


def _other(found: Found, order: Order) -> dict[str, Any]:
    unit = "dollars an hour" if order.has_prices else "with spares"
    return {
        "design": str(found.design),
        "workers": found.workers(),
        "price": f"{price(order, found):.4g} {unit}",
        "nodes": [row.as_dict() for row in nodes_of(order, found).rows],
    }


def _times(told: dict[str, Any]) -> str:
    return ", ".join(f"p{percent} {told[f'p{percent}_s']:.3g} s" for percent in PERCENTILES)

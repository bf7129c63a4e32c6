"""The nodes of a plan: how many of each kind, what runs there, and where the routers go.

A node with GPUs has cores that its workers hardly use, so routers run there while they take a small
part of them. On CPUs workers take every core: there routers get a smaller part, and else nodes of
their own.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from cluster.planning.plan.design import ROUTER_BUSY, front_of
from cluster.planning.plan.order import NodeKind, Order
from cluster.planning.plan.search import Found

BESIDE_GPUS, BESIDE_CPUS = 0.5, 0.1  # share of the workers' cores that routers may take there


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Nodes of one kind in all cells, spare ones included."""

    kind: str
    nodes: int
    spare: int
    runs: str
    pool: str  # its label in a cluster file
    devices: int  # of each node
    on_cpu: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Nodes:
    """routers: of all cells. proxies: Serve's, one on each node that has a router."""

    rows: tuple[NodeRow, ...]
    routers: int
    audio_workers: int
    proxies: int
    routers_beside_workers: bool
    dollars_per_hour: float


def nodes_of(order: Order, found: Found) -> Nodes:
    """Of what was found, with the spare nodes."""
    assert found.size is not None
    cells, rate = found.cells, order.load.rate_per_s
    split = found.design.placement == "split"
    of_cell = found.size.encoders + (found.size.decoders if split else 0)
    routers, audio_workers = front_of(found.costs, rate / cells, of_cell)
    rows = _worker_rows(order, found)
    cores = sum(row.nodes - row.spare for row in rows) * order.cores
    cpu = rate * (found.costs.router_s + found.costs.audio_cpu_s)
    beside = on_cpu(found.design.encoder) or on_cpu(found.design.decoder)
    is_beside = cpu <= (BESIDE_CPUS if beside else BESIDE_GPUS) * cores
    dollars = sum(_dollars(order, found, row) for row in rows)
    proxies = min(cells * routers, sum(row.nodes for row in rows))
    if not is_beside:
        needed = cells * math.ceil(cpu / cells / (ROUTER_BUSY * order.cores))
        spare = order.spare_nodes * cells
        rows.append(NodeRow("CPU node", needed + spare, spare, "routers", "router", 0, True))
        dollars += (needed + spare) * order.router_dollars
        proxies = needed + spare
    return Nodes(tuple(rows), cells * routers, audio_workers, proxies, is_beside, dollars)


def on_cpu(kind: NodeKind) -> bool:
    return kind.profile.machine.get("device") == "cpu"


def _worker_rows(order: Order, found: Found) -> list[NodeRow]:
    assert found.size is not None
    design, cells, each = found.design, found.cells, order.per_node
    if design.placement == "colocated":
        nodes = math.ceil(cells / each) + order.spare_nodes
        runs = f"{each} cell{'s' if each > 1 else ''} of one colocated worker each"
        return [
            NodeRow(
                design.encoder.name,
                nodes,
                order.spare_nodes,
                runs,
                "worker",
                each,
                on_cpu(design.encoder),
            )
        ]
    rows = []
    for role, kind in (("encoder", design.encoder), ("decoder", design.decoder)):
        needed = math.ceil(getattr(found.size, f"{role}s") / each)
        spare = order.spare_nodes
        runs = f"{each} {role}{'s' if each > 1 else ''} each"
        rows.append(
            NodeRow(
                kind.name, cells * (needed + spare), cells * spare, runs, role, each, on_cpu(kind)
            )
        )
    return rows


def _dollars(order: Order, found: Found, row: NodeRow) -> float:
    design = found.design
    kind = design.decoder if row.pool == "decoder" else design.encoder
    return row.nodes * row.devices * kind.dollars

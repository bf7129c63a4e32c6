"""The command `splitscribe plan`: what to buy for a load, and the files that start it."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

LENGTHS = StrEnum("LENGTHS", ["short", "mixed", "long"])
PLACES: tuple[Literal["split", "colocated"], ...] = ("split", "colocated")
PLACEMENTS = StrEnum("PLACEMENTS", ["split", "colocated"])


def plan(
    rate: Annotated[
        str | None, typer.Option(help="requests: 500/s, 30000/min; or --trace", show_default=False)
    ] = None,
    slo: Annotated[
        str, typer.Option(help="percentiles of the latency: 'p50 < 400 ms, p99 < 2 s'")
    ] = "p95 < 1 s",
    gpus: Annotated[
        str,
        typer.Option(help="devices, or profiles or their files, with dollars an hour of each"),
    ] = "h200,l40s",
    links: Annotated[str, typer.Option(help="network of a node: 400gbps, or 50GB/s")] = "100gbps",
    model: Annotated[str, typer.Option(help="large-v3 or large-v3-turbo")] = "large-v3",
    lengths: Annotated[
        LENGTHS, typer.Option(help="of the audio: medians of 5 s, 10 s, 10 minutes")
    ] = LENGTHS.short,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines with at_s and audio_s, in place of --rate and --lengths"),
    ] = None,
    placement: Annotated[
        PLACEMENTS | None, typer.Option(help="only this one [the cheaper one]")
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="devices of a node")] = 1,
    cores: Annotated[int, typer.Option(min=1, help="CPU cores of a node")] = 8,
    cpu_node: Annotated[
        float, typer.Option(min=0, help="dollars an hour of a node for routers alone")
    ] = 0.0,
    spare: Annotated[
        int, typer.Option(min=0, help="nodes of each role that may be lost: N+1 is 1")
    ] = 1,
    max_workers: Annotated[int, typer.Option(min=1, help="largest cluster to look at")] = 10_000,
    seconds: Annotated[
        float, typer.Option(min=20, help="simulated, of the check at the end")
    ] = 300.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="folder for the files", show_default=False),
    ] = None,
) -> None:
    """Find the cheapest cluster that keeps an objective, and write the files that start it.

    Tries colocated workers and split ones on every combination of --gpus, with KV and with encoder
    states handed over, by short simulations (splitscribe simulate), and checks what it found by a
    long one with another seed, and by one in which nodes are lost. It says what the cluster costs,
    what saturates next, and whether splitting pays. Without --output nothing is written. A plan
    from a predicted profile is a prediction.

    A few requests a second are planned within a minute, hundreds in several: each simulated request
    takes 0.5 to 2 ms of one core, and the two long simulations are most of it, which --seconds
    shortens.

    Example: splitscribe plan --rate 500/s --gpus h200:1.9,l40s:0.6 --links 400gbps -o plan
    """
    from cluster.planning.order import Order, make_load, parse_kinds, parse_link, parse_objectives
    from cluster.planning.plan import Search
    from cluster.planning.plan_report import figures_of, lines_of

    order = Order(
        load=make_load(rate, lengths.value, trace),
        objectives=parse_objectives(slo),
        kinds=parse_kinds(gpus, model),
        link_gbit_per_s=parse_link(links),
        per_node=per_node,
        spare_nodes=spare,
        cores=cores,
        router_dollars=cpu_node,
        most_workers=max_workers,
        placements=tuple(one for one in PLACES if placement is None or one == placement.value),
        check_s=seconds,
    )
    began_s = time.monotonic()

    def tell(line: str) -> None:
        err.print(f"{time.monotonic() - began_s:6.1f} s  {line}", markup=False)

    found = Search(order, tell).plan()
    figures = figures_of(found, time.monotonic() - began_s)
    out.print("\n".join(lines_of(found, figures)), markup=False)
    if output is None:
        return
    from cluster.cli.planning.plan_files import write_plan

    for file in write_plan(found, figures, output):
        out.print(f"wrote {file}", markup=False)
    command = f"splitscribe up {output}/cluster.yaml --serve {output}/serve.yaml"
    cells = found.best.size.cells
    above = f" for each of {cells} cells, below a balancer (configs/SCALE.md)" if cells > 1 else ""
    out.print(f"next: write your addresses into {output}/cluster.yaml, then: {command}{above}")

"""The command `splitscribe plan`: what to buy for a load, and the files that start it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from cluster.cli.planning.simulate_command import KINDS, LENGTHS, PLACEMENTS
from cluster.errors import ConfigurationError

if TYPE_CHECKING:
    from cluster.planning.plan.order import Placement

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

PROVIDERS = ("onprem", "aws")


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
    load: Annotated[KINDS, typer.Option(help="how requests come")] = KINDS.poisson,
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
    provider: Annotated[
        str, typer.Option(help="of the cluster file: onprem (your own machines) or aws")
    ] = "onprem",
) -> None:
    """Find the cheapest cluster that keeps an objective, and write the files that start it.

    Tries colocated workers and split ones on every combination of --gpus, with KV and with encoder
    states handed over, by short simulations (splitscribe simulate), and checks what it found by a
    long one with another seed, and by one in which nodes are lost. It says what the cluster costs,
    what saturates next, and whether splitting pays. Without --output nothing is written. A plan
    from a predicted profile is a prediction.

    A few requests a second are planned within a minute, hundreds in several: each simulated request
    takes 0.5 to 2 ms of one core, and the two long simulations are most of it, which --seconds
    shortens. Progress is on stderr, and says how long these will take.

    Example: splitscribe plan --rate 500/s --slo "p95 < 1 s" --gpus h200:1.9,l40s:0.6
    --links 400gbps -o plan; splitscribe up plan/cluster.yaml --serve plan/serve.yaml
    """
    from cluster.planning.plan.order import (
        CellLoads,
        Order,
        parse_kinds,
        parse_link,
        parse_objectives,
    )
    from cluster.planning.plan.planner import make_plan
    from cluster.planning.plan.report import figures_of, lines_of

    if provider not in PROVIDERS:
        raise ConfigurationError(f"--provider is one of {', '.join(PROVIDERS)}, not {provider!r}")
    order = Order(
        load=_load(rate, lengths.value, load.value, trace),
        objectives=parse_objectives(slo),
        kinds=parse_kinds(gpus, model),
        link_gbit_per_s=parse_link(links),
        per_node=per_node,
        spare_nodes=spare,
        cores=cores,
        router_dollars=cpu_node,
        most_workers=max_workers,
        placements=_placements(placement and placement.value),
    )
    began_s = time.monotonic()

    def tell(line: str) -> None:
        err.print(f"{time.monotonic() - began_s:6.1f} s  {line}", markup=False)

    with tempfile.TemporaryDirectory() as folder:
        found = make_plan(order, CellLoads(order, Path(folder)), seconds, tell)
    figures = figures_of(found, time.monotonic() - began_s)
    out.print("\n".join(lines_of(figures)), markup=False)
    if output is not None:
        from cluster.cli.planning.plan_files import write_plan

        for file in write_plan(found, figures, output, provider):
            out.print(f"wrote {file}", markup=False)
        out.print(f"next: {_next(found, output)}", markup=False)


def _load(rate: str | None, lengths: str, kind: str, trace: Path | None) -> Any:
    from cluster.planning.plan.order import parse_rate, rate_of_trace
    from cluster.planning.scenario import NAMED_LENGTHS, Load

    if trace is not None:
        if rate is not None:
            raise ConfigurationError("give --rate or --trace, not both: a trace has its own rate")
        per_s, seconds = rate_of_trace(trace)
        return Load(kind="trace", trace=trace, rate_per_s=per_s, seconds=seconds + 1e-3)
    if rate is None:
        raise ConfigurationError("how much is to be done? --rate 500/s, or --trace FILE")
    return Load.model_validate(
        {"kind": kind, "rate_per_s": parse_rate(rate), "lengths": NAMED_LENGTHS[lengths]}
    )


def _placements(only: str | None) -> tuple[Placement, ...]:
    both: tuple[Placement, ...] = ("split", "colocated")
    return tuple(one for one in both if only in (None, one))


def _next(found: Any, folder: Path) -> str:
    """The command that starts what was planned."""
    command = f"splitscribe up {folder}/cluster.yaml --serve {folder}/serve.yaml"
    cells = found.best.cells
    if cells == 1:
        return f"write your addresses into {folder}/cluster.yaml, then: {command}"
    return (
        f"{cells} cells, each: {command}; above them a balancer (configs/SCALE.md, "
        "configs/tls/haproxy.cfg)"
    )

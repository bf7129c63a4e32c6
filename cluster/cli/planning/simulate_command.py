"""The commands `splitscribe simulate`, `plan` and `profile`."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from cluster.common.errors import ConfigurationError
from cluster.common.settings_sources import load_settings

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

TOLD_EVERY_S = 2.0  # of this machine's time, between two lines of progress


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(help="YAML or JSON file; flags win over what it says", show_default=False),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="one that comes with the package, or a file [two-cores]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second [10]")] = None,
    seconds: Annotated[float | None, typer.Option(help="during which they come [300]")] = None,
    encoders: Annotated[int | None, typer.Option(help="or colocated workers [1]")] = None,
    decoders: Annotated[int | None, typer.Option(help="[1]")] = None,
    routers: Annotated[int | None, typer.Option(help="[1]")] = None,
    kill: Annotated[
        list[str] | None, typer.Option(help="SECOND:ROLE[:COUNT], such as 60:encoder; repeatable")
    ] = None,
    slo: Annotated[
        float | None, typer.Option(help="seconds for an answer, and 0.1 s a second of audio [1]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of all chance [0]")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write all figures there", show_default=False)
    ] = None,
    profiles: Annotated[bool, typer.Option("--profiles", help="list profiles")] = False,
) -> None:
    """Try a cluster and a load without either: the real policies on a virtual clock.

    Admission, batching, scheduling, pages, choice of workers, autoscaling, retries and deadlines
    are all the server's own code. Time and devices come from a profile, which `splitscribe profile`
    measures. The same seed gives the same figures. What has no flag goes into the scenario's file:
    other loads, lengths of audio, nodes and links, the server's settings. configs/PLANNING.md has
    an example.

    Example: splitscribe simulate --rate 12 --encoders 2 --json report.json
    """
    from cluster.planning.profile import load_profile, shipped_profiles
    from cluster.planning.scenario import make_scenario, read_scenario

    if profiles:
        for name in shipped_profiles():
            one = load_profile(name)
            out.print(f"{one}: {one.source}", markup=False)
        return
    fields = read_scenario(scenario) if scenario is not None else {}
    _put(fields, "load", {"rate_per_s": rate, "seconds": seconds})
    _put(fields, "cluster", {"encoders": encoders, "decoders": decoders, "routers": routers})
    _put(fields, "slo", {"latency_s": slo})
    faults = [_fault(one) for one in kill or ()]
    given = {"profile": profile, "seed": seed, "faults": faults or None}
    fields |= {name: value for name, value in given.items() if value is not None}
    figures = _run(make_scenario(fields))
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {json_file}: {error}") from error


def _run(scenario: Any) -> dict[str, Any]:
    from cluster.planning import simulate as simulation
    from cluster.planning.profile import load_profile
    from cluster.planning.report import lines_of, summary

    profile = load_profile(scenario.profile)
    began_s = told_s = time.perf_counter()

    def tell(at_s: float, n_requests: int) -> None:
        nonlocal told_s
        now_s = time.perf_counter()
        if now_s - told_s >= TOLD_EVERY_S:
            told_s = now_s
            err.print(f"second {at_s:.0f} of {scenario.load.seconds:g}, {n_requests} requests")

    outcome = simulation.simulate(scenario, profile, tell)
    figures = summary(outcome, time.perf_counter() - began_s)
    out.print("\n".join([str(profile), *lines_of(figures)]), markup=False)
    return figures


def _put(fields: dict[str, Any], part: str, given: dict[str, Any]) -> None:
    """What was given by flags, over what a scenario's file says of a part."""
    said = {name: value for name, value in given.items() if value is not None}
    if said:
        old = fields.get(part)
        fields[part] = (old if isinstance(old, dict) else {}) | said


def _fault(text: str) -> dict[str, Any]:
    at, _, rest = text.partition(":")
    role, _, count = rest.partition(":")
    try:
        return {"at_s": float(at), "role": role, "count": int(count or 1)}
    except ValueError as error:
        raise ConfigurationError(
            f"--kill is SECOND:ROLE[:COUNT], such as 60:encoder:2, not {text!r}"
        ) from error


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


out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path(
        "profile.json"
    ),
    model: Annotated[str | None, typer.Option(help="'demo', a folder, or a Hub id [demo]")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with settings", show_default=False)
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="a running server, whose router and audio workers are measured too"),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="of that server")] = None,
    name: Annotated[str | None, typer.Option(help="of the profile [the file's]")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="of each, whose fastest counts")] = 15,
) -> None:
    """Measure what workers take on this machine, for splitscribe simulate.

    Times one encoder and one decoder in this process, on an otherwise idle machine: batches by size
    and context, decode steps by rows and context, prompts, and the hand-off of KV. With --url also
    the router and the audio workers of a server that runs there and has nothing else to do.

    Example: splitscribe profile -o mine.json && splitscribe simulate --profile mine.json
    """
    settings = load_settings(config_file, {"model": model})
    from cluster.planning.measure import Asked, measure
    from cluster.planning.profile import save_profile

    asked = Asked(name or output.stem, settings, url, api_key, rounds)
    found = measure(asked, lambda line: err.print(line, markup=False))
    save_profile(found, output)
    out.print(f"wrote {output}", markup=False)

"""The command `splitscribe simulate`: a scenario from its file and flags, and its report."""

from __future__ import annotations

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.errors import ConfigurationError

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

LENGTHS = StrEnum("LENGTHS", ["short", "mixed", "long"])
KINDS = StrEnum("KINDS", ["poisson", "diurnal", "bursts"])
PLACEMENTS = StrEnum("PLACEMENTS", ["split", "colocated"])
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
    lengths: Annotated[
        LENGTHS | None, typer.Option(help="of the audio: medians of 5 s, 10 s, 10 minutes [short]")
    ] = None,
    load: Annotated[KINDS | None, typer.Option(help="how they come [poisson]")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with at_s and audio_s, in place of --load")
    ] = None,
    bulk: Annotated[float | None, typer.Option(help="share of bulk requests [0]")] = None,
    encoders: Annotated[int | None, typer.Option(help="or colocated workers [1]")] = None,
    decoders: Annotated[int | None, typer.Option(help="[1]")] = None,
    routers: Annotated[int | None, typer.Option(help="[1]")] = None,
    placement: Annotated[PLACEMENTS | None, typer.Option(help="[split]")] = None,
    per_node: Annotated[int | None, typer.Option(help="workers of a node [all on one]")] = None,
    link: Annotated[float | None, typer.Option(help="Gbit/s between nodes [profile's]")] = None,
    kill: Annotated[
        list[str] | None, typer.Option(help="SECOND:ROLE[:COUNT], such as 60:encoder; repeatable")
    ] = None,
    rack: Annotated[
        list[str] | None,
        typer.Option(help="SECOND[:SHARE], such as 60:0.05: so much of each pool ends; repeatable"),
    ] = None,
    slo: Annotated[
        float | None, typer.Option(help="seconds for an answer, and 0.1 s a second of audio [1]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="of all chance [0]")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write all figures there", show_default=False)
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="write a report with charts", show_default=False)
    ] = None,
    profiles: Annotated[bool, typer.Option("--profiles", help="list profiles")] = False,
) -> None:
    """Try a cluster and a load without either: the real policies on a virtual clock.

    Admission, batching, scheduling, pages, choice of workers, autoscaling, retries and deadlines
    are all the server's own code. Time and devices come from a profile, which `splitscribe profile`
    measures. The same seed gives the same figures. Settings of the server go into the scenario's
    file, under `settings`. configs/PLANNING.md has examples.

    Example: splitscribe simulate --rate 12 --encoders 2 --html report.html
    """
    from cluster.planning.profile import load_profile, shipped_profiles

    if profiles:
        for name in shipped_profiles():
            one = load_profile(name)
            kind = "predicted" if one.predicted else "measured"
            out.print(f"{name}: {one.model}, {kind}: {one.source}", markup=False)
        return
    from cluster.planning.scenario import NAMED_LENGTHS, make_scenario, read_scenario

    fields = read_scenario(scenario) if scenario is not None else {}
    load_fields = {
        "rate_per_s": rate,
        "seconds": seconds,
        "kind": "trace" if trace is not None else load and load.value,
        "trace": trace,
        "lengths": lengths and NAMED_LENGTHS[lengths.value].model_dump(),
        "classes": None if bulk is None else {"interactive": 1.0 - bulk, "bulk": bulk},
    }
    cluster_fields = {
        "encoders": encoders,
        "decoders": decoders,
        "routers": routers,
        "placement": placement and placement.value,
        "per_node": per_node,
        "link_gbit_per_s": link,
    }
    _merge(fields, "load", load_fields)
    _merge(fields, "cluster", cluster_fields)
    _merge(fields, "slo", {"latency_s": slo})
    given = {
        "profile": profile,
        "seed": seed,
        "faults": [_fault(one) for one in kill or ()] or None,
        "racks": [_rack(one) for one in rack or ()] or None,
    }
    fields |= {name: value for name, value in given.items() if value is not None}
    _run(make_scenario(fields), json_file, html_file)


def _run(scenario: Any, json_file: Path | None, html_file: Path | None) -> None:
    from cluster.planning.profile import load_profile
    from cluster.planning.report import page, summary
    from cluster.planning.simulation.run import simulate as run

    found = load_profile(scenario.profile)
    began_s = told_s = time.perf_counter()

    def tell(at_s: float, n_requests: int) -> None:
        nonlocal told_s
        now_s = time.perf_counter()
        if now_s - told_s >= TOLD_EVERY_S:
            told_s = now_s
            err.print(f"second {at_s:.0f} of {scenario.load.seconds:g}, {n_requests} requests")

    outcome = run(scenario, found, tell)
    figures = summary(outcome, time.perf_counter() - began_s)
    _print(figures)
    if json_file is not None:
        _write(json_file, json.dumps(figures, indent=1) + "\n")
    if html_file is not None:
        _write(html_file, page(outcome, figures))


def _print(figures: dict[str, Any]) -> None:
    """The figures that people look at first."""
    profile = figures["profile"]
    kind = "predicted, not measured" if profile["predicted"] else "measured"
    lines = [
        f"profile {profile['name']} ({kind}), model {profile['model']}",
        f"{figures['requests']} requests in {figures['simulated_s']:g} simulated seconds; "
        f"this took {figures['run_time_s']:g} s",
        f"goodput {figures['goodput_per_s']:g} requests/s, answered "
        f"{figures['throughput_per_s']:g} requests/s, "
        f"{figures['audio_s_per_s']:g} s of audio per second",
    ]
    for name, one in figures["classes"].items():
        times = ", ".join(f"p{p} {one[f'p{p}_s']:g} s" for p in (50, 95, 99) if f"p{p}_s" in one)
        failed = "".join(f", {n} failed with {why}" for why, n in one["failed"].items())
        lines.append(f"{name}: {times or 'no answer'}, {one['within_slo']:.1%} good{failed}")
    used = figures["utilisation"]
    if used:
        lines.append(
            f"busy: encoders {used['encoder_busy']:.0%}, decoders {used['decoder_busy']:.0%}; "
            f"pages: export {used['encoder_pages']:.0%}, decode {used['decoder_pages']:.0%}; "
            f"at most {used['most_pending']} requests pending"
        )
    lines += [f"at {one['at_s']:g} s: {one['what']} ({one['why']})" for one in figures["decisions"]]
    if (price := figures["cost"].get("dollars_per_audio_hour")) is not None:
        lines.append(f"cost: {price:g} dollars for an hour of audio")
    out.print("\n".join(lines), markup=False)


def _merge(fields: dict[str, Any], part: str, given: dict[str, Any]) -> None:
    """Put what was given by flags over what a scenario's file says of a part."""
    said = {name: value for name, value in given.items() if value is not None}
    if said:
        old = fields.get(part)
        fields[part] = (old if isinstance(old, dict) else {}) | said


def _fault(text: str) -> dict[str, Any]:
    """SECOND:ROLE[:COUNT]"""
    at, _, rest = text.partition(":")
    role, _, count = rest.partition(":")
    try:
        return {"at_s": float(at), "role": role, "count": int(count or 1)}
    except ValueError as error:
        raise ConfigurationError(
            f"--kill is SECOND:ROLE[:COUNT], such as 60:encoder:2, not {text!r}"
        ) from error


def _rack(text: str) -> dict[str, Any]:
    """SECOND[:SHARE]"""
    at, _, share = text.partition(":")
    try:
        return {"at_s": float(at), "share": float(share or 0.05)}
    except ValueError as error:
        raise ConfigurationError(
            f"--rack is SECOND[:SHARE], such as 60:0.05, not {text!r}"
        ) from error


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write {file}: {error}") from error

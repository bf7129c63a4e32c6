"""The command `splitscribe simulate`: a scenario from its file and flags, and its report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cluster.common.errors import ConfigurationError

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
    faults, racks = [_fault(one) for one in kill or ()], [_rack(one) for one in rack or ()]
    given = {"profile": profile, "seed": seed, "faults": faults or None, "racks": racks or None}
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


def _rack(text: str) -> dict[str, Any]:
    at, _, share = text.partition(":")
    try:
        return {"at_s": float(at), "share": float(share or 0.05)}
    except ValueError as error:
        raise ConfigurationError(
            f"--rack is SECOND[:SHARE], such as 60:0.05, not {text!r}"
        ) from error

"""The commands `splitscribe simulate`, `plan` and `profile`, and the files of a plan."""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml
from rich.console import Console

from cluster.cli.config import shipped_config
from cluster.cli.operate.files import read_cluster_file, read_serve_file
from cluster.common.errors import ConfigurationError
from cluster.common.settings_sources import load_settings, read_yaml

if TYPE_CHECKING:
    from cluster.planning.design import NodeRow
    from cluster.planning.plan import Plan
    from cluster.planning.profile import Profile

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

TOLD_EVERY_S = 60.0  # of the simulated time, between two lines of progress
HEAD = ipaddress.ip_address("10.0.0.10")  # examples; the operator writes the real ones
MODELS = {
    "large-v3": "openai/whisper-large-v3",
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
}


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
    from cluster.planning import simulate as simulation
    from cluster.planning.profile import load_profile, shipped_profiles, write_text
    from cluster.planning.report import summary
    from cluster.planning.scenario import make_scenario

    if profiles:
        for name in shipped_profiles():
            one = load_profile(name)
            out.print(f"{one}: {one.source}", markup=False)
        return
    fields = read_yaml(scenario, "the scenario") if scenario is not None else {}
    if not isinstance(fields, dict):
        raise ConfigurationError(f"the scenario {scenario} must be a mapping of fields")
    parts: dict[str, dict[str, Any]] = {
        "load": {"rate_per_s": rate, "seconds": seconds},
        "cluster": {"encoders": encoders, "decoders": decoders, "routers": routers},
        "slo": {"latency_s": slo},
    }
    for part, flags in parts.items():
        if given := _given(flags):
            fields[part] = (fields.get(part) or {}) | given
    faults = [_fault(one) for one in kill or ()] or None
    fields |= _given({"profile": profile, "seed": seed, "faults": faults})
    checked = make_scenario(fields)

    def tell(at_s: float, n_requests: int) -> None:
        if at_s % TOLD_EVERY_S < simulation.MOMENT_S:
            err.print(f"second {at_s:.0f} of {checked.load.seconds:g}, {n_requests} requests")

    began_s, of_devices = time.perf_counter(), load_profile(checked.profile)
    outcome = simulation.simulate(checked, of_devices, tell)
    figures = summary(outcome, time.perf_counter() - began_s)
    _show(of_devices, figures, without=("profile", "scenario", "moments"))
    if json_file is not None:
        write_text(json_file, json.dumps(figures, indent=1) + "\n")


def _fault(text: str) -> dict[str, Any]:
    at, _, rest = text.partition(":")
    role, _, count = rest.partition(":")
    try:
        return {"at_s": float(at), "role": role, "count": int(count or 1)}
    except ValueError as error:
        raise ConfigurationError(
            f"--kill is SECOND:ROLE[:COUNT], such as 60:encoder:2, not {text!r}"
        ) from error


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _show(profile: Profile, figures: dict[str, Any], without: Sequence[str]) -> None:
    """The figures that people look at, as YAML."""
    shown = {name: value for name, value in figures.items() if value and name not in without}
    out.print(str(profile), markup=False)
    out.print(yaml.safe_dump(shown, sort_keys=False, width=120), markup=False, end="")


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
        Literal["short", "mixed", "long"],
        typer.Option(help="of the audio: medians of 5 s, 10 s, 10 minutes"),
    ] = "short",
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines with at_s and audio_s, in place of --rate and --lengths"),
    ] = None,
    placement: Annotated[
        Literal["split", "colocated"] | None, typer.Option(help="only this one [the cheaper one]")
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

    Example: splitscribe plan --rate 500/s --gpus h200:1.9,l40s:0.6 -o plan
    """
    from cluster.planning.design import Order, make_load, parse_kinds, parse_link, parse_objectives
    from cluster.planning.plan import make_plan

    order = Order(
        load=make_load(rate, lengths, trace),
        objectives=parse_objectives(slo),
        kinds=parse_kinds(gpus, model),
        link_gbit_per_s=parse_link(links),
        per_node=per_node,
        spare_nodes=spare,
        cores=cores,
        router_dollars=cpu_node,
        most_workers=max_workers,
        placements=(placement,) if placement is not None else ("split", "colocated"),
        check_s=seconds,
    )
    began_s = time.monotonic()

    def tell(line: str) -> None:
        err.print(f"{time.monotonic() - began_s:6.1f} s  {line}", markup=False)

    found = make_plan(order, tell)
    figures = found.figures() | {"run_time_s": round(time.monotonic() - began_s, 1)}
    _show(found.best.design.profile(), figures, without=("profile", "run_time_s"))
    if output is None:
        return
    for file in write_plan(found, figures, output):
        out.print(f"wrote {file}", markup=False)
    command = f"splitscribe up {output}/cluster.yaml --serve {output}/serve.yaml"
    cells = found.best.cells
    above = f" for each of {cells} cells, below a balancer (configs/SCALE.md)" if cells > 1 else ""
    out.print(f"next: write your addresses into {output}/cluster.yaml, then: {command}{above}")


def write_plan(plan: Plan, figures: dict[str, Any], folder: Path) -> list[Path]:
    """Serve configuration, cluster file, figures, and the scenario of its check with its profile.

    The folder is made. The YAML files are of one cell, and are read back by the checks with which
    `splitscribe deploy` and `splitscribe up` begin.

    Raises:
        ConfigurationError: a file cannot be written.
    """
    from cluster.planning.profile import save_profile, write_text

    order, cells, scenario = plan.best.order, plan.best.cells, plan.check.scenario
    again = scenario.model_dump(mode="json", exclude={"settings"}) | {"profile": "profile.json"}
    again["settings"] = scenario.settings.model_dump(mode="json", exclude_defaults=True)
    each = f" One of {cells} cells, each of which gets this." if cells > 1 else ""
    head = f"# Planned: {order.load.rate_per_s:g} requests a second, {order.asked}.{each}\n"
    texts = {
        "serve.yaml": head + "# Clients' keys: router.api_key_file.\n" + _serve(plan),
        "cluster.yaml": head + cluster_file(plan.best.nodes(), cells),
        "plan.json": json.dumps(figures, indent=1) + "\n",
        "check.yaml": "# splitscribe simulate check.yaml, in this folder: the plan's check again\n"
        + yaml.safe_dump(again, sort_keys=False),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write the plan into {folder}: {error}") from error
    for name, text in texts.items():
        write_text(folder / name, text)
    save_profile(plan.best.design.profile(), folder / "profile.json")
    read_serve_file(folder / "serve.yaml")
    read_cluster_file(folder / "cluster.yaml")
    return [folder / name for name in (*texts, "profile.json")]


def _serve(plan: Plan) -> str:
    """For `splitscribe deploy`: its spare workers included."""
    best, router = plan.best, plan.check.scenario.settings.router
    design, model = best.design, best.design.profile().model
    spare = best.order.spare_nodes * best.order.per_node
    has_own = any(row.pool == "router" for row in best.nodes())
    args: dict[str, Any] = {
        "model": MODELS.get(model, model),
        "placement": design.placement,
        "handoff": design.handoff,
        "router": {
            "replicas": plan.check.scenario.cluster.routers,
            "audio_workers": router.audio_workers,
            "max_pending_audio_s": round(router.max_pending_audio_s, 1),
            "node_labels": {"pool": "router" if has_own else "!head"},
        },
    }
    for role, kind, workers in (
        ("encoder", design.encoder, best.encoders),
        ("decoder", design.decoder, best.decoders),
    ):
        args[role] = {
            "replicas": workers + spare if design.is_split else 1,
            "node_labels": {"pool": role if design.is_split else "worker"},
            **({"device": "cpu"} if kind.on_cpu else {"device": "cuda", "gpus": 1}),
        }
    content = read_yaml(shipped_config("serve/cpu").path, "Serve configuration")
    content["applications"][0]["args"] = args
    return yaml.safe_dump(content, sort_keys=False)


def cluster_file(rows: Sequence[NodeRow], cells: int) -> str:
    """A cell's machines, in the shipped cluster/onprem, with example addresses."""
    text = shipped_config("cluster/onprem").path.read_text(encoding="utf-8")
    before, case, rest = text.partition('    case " $(hostname -I) " in\n')
    _, end, after = rest.partition("    esac;\n")
    if not case or not end:
        raise ConfigurationError("the shipped cluster/onprem has no table of pools any more")
    if any(row.devices and not row.on_cpu for row in rows):
        before = before.replace("  # With GPUs: - ", "  - ")
    addresses: list[str] = []
    cases, counts = "", []
    for row in rows:
        # A cell of one colocated worker has one node with one device.
        n_nodes = 1 if row.pool == "worker" else row.nodes // cells
        own = [str(HEAD + len(addresses) + number) for number in range(1, n_nodes + 1)]
        addresses += own
        patterns = "|".join(f'*" {address} "*' for address in own)
        cases += f"    {patterns}) pool={row.pool} ;;\n"
        counts.append(f"{n_nodes} {row.pool} ({row.kind})")
    listed = f"worker_ips: [{', '.join(addresses)}]"
    before = before.replace("worker_ips: [10.0.0.11, 10.0.0.12]", listed)
    about = "The addresses are examples, here and in the table of pools."
    return f"# Nodes: {', '.join(counts)}. {about}\n#\n{before}{case}{cases}{end}{after}"


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
    rounds: Annotated[int, typer.Option(min=3, help="of each, whose fastest counts")] = 5,
) -> None:
    """Measure what workers take on this machine, for splitscribe simulate.

    Times one encoder and one decoder in this process, on an otherwise idle machine: batches by size
    and context, decode steps by rows and context, prompts, and the hand-off of KV. With --url also
    the router and the audio workers of a server that runs there and has nothing else to do.

    Example: splitscribe profile -o mine.json && splitscribe simulate --profile mine.json
    """
    settings = load_settings(config_file, {"model": model})
    from cluster.planning.measure import measure
    from cluster.planning.profile import save_profile

    tell = partial(err.print, markup=False)
    found = measure(name or output.stem, settings, url, api_key, rounds, tell)
    save_profile(found, output)
    out.print(f"wrote {output}", markup=False)

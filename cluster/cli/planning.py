"""The commands `splitscribe simulate`, `plan` and `profile`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml
from rich.console import Console

from cluster.cli.config import shipped_config
from cluster.common.errors import ConfigurationError
from cluster.common.settings_sources import load_settings, read_fields, read_yaml

if TYPE_CHECKING:
    from cluster.planning.plan import Plan

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(help="YAML or JSON file; flags win over what it says", show_default=False),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="name of a shipped profile, or a file [two-cores]")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="requests per second [10]")] = None,
    seconds: Annotated[float | None, typer.Option(help="how long they come [300]")] = None,
    encoders: Annotated[int | None, typer.Option(help="number of encoder workers [1]")] = None,
    decoders: Annotated[int | None, typer.Option(help="number of decoder workers [1]")] = None,
    routers: Annotated[int | None, typer.Option(help="number of routers [1]")] = None,
    slo: Annotated[
        float | None, typer.Option(help="seconds within which an answer is good [1]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of all random numbers [0]")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write all figures there", show_default=False)
    ] = None,
    profiles: Annotated[bool, typer.Option("--profiles", help="list profiles")] = False,
) -> None:
    """Simulate a cluster under a load: the server's own policies on a virtual clock.

    Admission, batching, scheduling, pages, choice of workers, autoscaling, retries and deadlines
    are all the server's own code. Time and devices come from a profile, which `splitscribe profile`
    measures. The same seed gives the same figures. What has no flag goes into the scenario's file:
    other loads, lengths of audio, nodes and links, the server's settings. configs/PLANNING.md has
    an example.

    Example: splitscribe simulate --rate 12 --encoders 2 --json report.json
    """
    from cluster.planning import simulate as simulation
    from cluster.planning.profile import load_profile, shipped_profiles, write_text
    from cluster.planning.scenario import Scenario, checked

    if profiles:
        for name in shipped_profiles():
            one = load_profile(name)
            out.print(f"{one}: {one.source}", markup=False)
        return
    flags = {
        "profile": profile,
        "load": {"rate_per_s": rate, "seconds": seconds},
        "slo_s": slo,
        "settings": {
            "router": {"replicas": routers},
            "encoder": {"replicas": encoders},
            "decoder": {"replicas": decoders},
        },
        "seed": seed,
    }
    asked = checked(Scenario, read_fields(scenario, "the scenario", flags))
    of_devices = load_profile(asked.profile)
    with err.status("simulating: 0.5 to 2 ms for a request"):
        figures = simulation.simulate(asked, of_devices).summary()
    out.print(str(of_devices), markup=False)
    shown = figures_as_yaml(figures, without=("profile", "scenario", "settings", "moments"))
    out.print(shown, markup=False, end="")
    if json_file is not None:
        write_text(json_file, json.dumps(figures, indent=1) + "\n")


def figures_as_yaml(figures: dict[str, Any], without: Iterable[str]) -> str:
    told = {name: value for name, value in figures.items() if name not in without}
    shown = {name: value for name, value in told.items() if value or value == 0}
    return yaml.safe_dump(shown, sort_keys=False, width=96)


def plan(
    rate: Annotated[float, typer.Option(min=0.001, help="requests per second")],
    slo: Annotated[
        float, typer.Option(min=0.001, help="seconds within which 95 % are answered")
    ] = 1.0,
    gpus: Annotated[
        str, typer.Option(help="devices, profiles or their files, each with its dollars per hour")
    ] = "h200,l40s",
    links: Annotated[float, typer.Option(min=0.001, help="Gbit/s of a node's network")] = 100.0,
    model: Annotated[str, typer.Option(help="large-v3 or large-v3-turbo")] = "large-v3",
    lengths: Annotated[
        Literal["short", "mixed", "long"],
        typer.Option(help="length of the audio, in the median 5 s, 10 s or 10 minutes"),
    ] = "short",
    placement: Annotated[
        Literal["split", "colocated"] | None, typer.Option(help="plan only this [the cheaper one]")
    ] = None,
    per_node: Annotated[int, typer.Option(min=1, help="devices in a node")] = 1,
    spare: Annotated[
        int, typer.Option(min=0, help="spare nodes of each role, beyond those that the load needs")
    ] = 1,
    seconds: Annotated[
        float, typer.Option(min=20, help="simulated seconds of the check at the end")
    ] = 300.0,
) -> None:
    """Find the cheapest cluster that meets an objective, and print the file that deploys it.

    Tries colocated and split workers on every combination of --gpus in short simulations
    (splitscribe simulate), and checks the best in a long one with another seed. The comments of
    the file say what the cluster costs, how many nodes each pool has, what saturates next, and
    whether splitting pays. A plan from a predicted profile is a prediction.

    A plan for a few requests per second takes less than a minute, for hundreds several: each
    simulated request takes 0.5 to 2 ms of one core. Most of it is the check; see --seconds.

    Example: splitscribe plan --rate 500 --gpus h200:1.9,l40s:0.6 > serve.yaml
    """
    from cluster.planning.design import Order, parse_kinds
    from cluster.planning.plan import make_plan
    from cluster.planning.scenario import NAMED_LENGTHS, Load, checked

    load = {"rate_per_s": rate, "seconds": seconds, "lengths": NAMED_LENGTHS[lengths]}
    order = Order(
        load=checked(Load, load),
        slo_s=slo,
        kinds=parse_kinds(gpus, model),
        link_gbit_per_s=links,
        per_node=per_node,
        spare_nodes=spare,
        placements=(placement,) if placement is not None else ("split", "colocated"),
    )
    found = make_plan(order, partial(err.print, markup=False))
    out.print(plan_file(found), markup=False, end="")


def plan_file(plan: Plan) -> str:
    best, order = plan.best, plan.best.order
    args: dict[str, Any] = {
        "model": best.profile.model,
        "placement": best.placement,
        "router": best.router().model_dump(exclude_unset=True),
    }
    for role, (kind, workers) in best.pools.items():
        is_cpu = kind.profile.machine.get("device") == "cpu"
        args[role] = {
            "replicas": workers + order.spare_nodes * order.per_node if best.is_split else 1,
            "node_labels": {"pool": role if best.is_split else "worker"},
            **({"device": "cpu"} if is_cpu else {"device": "cuda", "gpus": 1}),
        }
    content = read_yaml(shipped_config("serve/cpu").path, "Serve configuration")
    content["applications"][0]["args"] = args
    each = f"each of {best.cells} cells, below a balancer (configs/SCALE.md)"
    told = [
        str(best.profile),
        *figures_as_yaml(plan.figures(), ("profile",)).split("\n"),
        f"For {each if best.cells > 1 else 'a cluster'}. Nodes need the labels of their pools:",
        "splitscribe config show cluster/onprem. Clients' keys: router.api_key_file.",
    ]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in told)
    return comment + yaml.safe_dump(content, sort_keys=False)


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")] = Path(
        "profile.json"
    ),
    model: Annotated[str | None, typer.Option(help="'demo', a folder, or a Hub id [demo]")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="YAML file with settings", show_default=False)
    ] = None,
    rounds: Annotated[int, typer.Option(min=3, help="runs, of which the fastest counts")] = 5,
) -> None:
    """Measure how long each step of the work takes here, for `splitscribe simulate`.

    Times one encoder and one decoder in this process, on an otherwise idle machine: batches by size
    and context, decode steps by rows and context, prompts, and the hand-off of KV. Router and audio
    workers are assumed.

    Example: splitscribe profile -o mine.json && splitscribe simulate --profile mine.json
    """
    settings = load_settings(config_file, {"model": model})
    if settings.models:
        raise ConfigurationError("one model is measured at a time: --config with model, not models")
    if output.is_dir() or not output.parent.is_dir():  # fail before minutes of measuring
        raise ConfigurationError(f"--output must be a file in an existing folder, not {output}")
    from cluster.planning.measure import measure
    from cluster.planning.profile import write_text

    tell = partial(err.print, markup=False)
    found = asyncio.run(measure(output.stem, settings, rounds, tell))
    write_text(output, found.model_dump_json(indent=1) + "\n")
    out.print(f"wrote {output}", markup=False)

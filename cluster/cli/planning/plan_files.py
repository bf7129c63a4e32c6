"""Writes a plan: Serve configuration, cluster file, figures, and the scenario of its check.

The YAML files are read back by the checks with which `splitscribe deploy` and `splitscribe up`
begin.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cluster.cli.operate.cluster_file import read_cluster_file
from cluster.cli.operate.serve_file import read_serve_file
from cluster.cli.shipped import shipped_config
from cluster.errors import ConfigurationError
from cluster.planning.plan.nodes import NodeRow, Nodes, nodes_of, on_cpu
from cluster.planning.plan.planner import Planned
from cluster.planning.profile import save_profile

HEAD = ipaddress.ip_address("10.0.0.10")  # examples; the operator writes the real ones
MODELS = {
    "large-v3": "openai/whisper-large-v3",
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
}
# https://aws.amazon.com/ec2/instance-types: GPUs of a node, and its name
INSTANCES = {
    ("l40s", 1): "g6e.2xlarge",
    ("l40s", 4): "g6e.12xlarge",
    ("l40s", 8): "g6e.48xlarge",
    ("h100", 1): "p5.4xlarge",
    ("h100", 8): "p5.48xlarge",
    ("h200", 8): "p5en.48xlarge",
}
CPU_INSTANCE = "m7i.2xlarge"


def write_plan(plan: Planned, figures: dict[str, Any], folder: Path, provider: str) -> list[Path]:
    """All files, checked; the folder is made.

    Raises:
        ConfigurationError: a file cannot be written, or the provider has no such node.
    """
    nodes = nodes_of(plan.order, plan.best)
    rows = rows_of_cell(nodes, plan.best.cells)
    cluster = onprem(rows) if provider == "onprem" else aws(rows, plan.order.cores)
    scenario = plan.check_scenario.model_dump(mode="json", exclude={"settings"})
    scenario["settings"] = plan.check_scenario.settings.model_dump(
        mode="json", exclude_defaults=True
    )
    texts = {
        "serve.yaml": serve_file(plan, nodes),
        "cluster.yaml": cluster,
        "plan.json": json.dumps(figures, indent=1) + "\n",
        "check.yaml": "# splitscribe simulate check.yaml, in this folder: the plan's check again\n"
        + yaml.safe_dump(scenario | {"profile": "profile.json"}, sort_keys=False),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write the plan into {folder}: {error}") from error
    save_profile(plan.best.design.profile(), folder / "profile.json")
    read_serve_file(folder / "serve.yaml")
    read_cluster_file(folder / "cluster.yaml")
    return [folder / name for name in (*texts, "profile.json")]


def rows_of_cell(nodes: Nodes, cells: int) -> list[NodeRow]:
    """The nodes of one cell. A cell of one colocated worker has one node with one device."""
    rows = []
    for row in nodes.rows:
        if row.pool == "worker":
            rows.append(replace(row, nodes=1, spare=0, devices=1))
        else:
            rows.append(replace(row, nodes=row.nodes // cells, spare=row.spare // cells))
    return rows


def serve_file(plan: Planned, nodes: Nodes) -> str:
    """For `splitscribe deploy`: one cell, its spare workers included."""
    best, cells = plan.best, plan.best.cells
    split = best.design.placement == "split"
    profile = best.design.profile()
    assert best.size is not None
    spare = plan.spare if split else 0
    settings = plan.check_scenario.settings
    args: dict[str, Any] = {
        "model": MODELS.get(profile.model, profile.model),
        "placement": best.design.placement,
        "handoff": best.design.handoff,
        "router": {
            "replicas": nodes.routers // cells,
            "audio_workers": nodes.audio_workers,
            "max_pending_audio_s": round(settings.router.max_pending_audio_s, 1),
            "node_labels": {"pool": "!head" if nodes.routers_beside_workers else "router"},
        },
        "encoder": _role(plan, "encoder", best.size.encoders + spare),
        "decoder": _role(plan, "decoder", best.size.decoders + spare),
    }
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 90},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [
            {
                "name": "splitscribe",
                "route_prefix": "/",
                "import_path": "cluster.serve.from_file:build",
                "args": args,
            }
        ],
    }
    return _header(plan, "application") + yaml.safe_dump(content, sort_keys=False)


def onprem(rows: Sequence[NodeRow]) -> str:
    """A cluster file of one's own machines, as the shipped one, with example addresses."""
    text = shipped_config("cluster/onprem").path.read_text(encoding="utf-8")
    pools = [row.pool for row in rows for _ in range(row.nodes)]
    addresses = [str(HEAD + number + 1) for number in range(len(pools))]
    before, case, rest = text.partition('    case " $(hostname -I) " in\n')
    _, end, after = rest.partition("    esac;\n")
    if not case or not end:
        raise ConfigurationError("the shipped cluster/onprem has no table of pools any more")
    cases = []
    for pool in dict.fromkeys(pools):
        own = [one for one, other in zip(addresses, pools, strict=True) if other == pool]
        patterns = "|".join(f'*" {address} "*' for address in own)
        cases.append(f"    {patterns}) pool={pool} ;;\n")
    listed = f"worker_ips: [{', '.join(addresses)}]"
    before = before.replace("worker_ips: [10.0.0.11, 10.0.0.12]", listed)
    counts = ", ".join(f"{row.nodes} {row.pool} ({row.kind})" for row in rows)
    if any(row.devices and not row.on_cpu for row in rows):
        before = before.replace("  # With GPUs: - ", "  - ")
    head = f"# Planned: {counts}. The addresses are examples, here and in the table of pools.\n#\n"
    return head + before + case + "".join(cases) + end + after


def aws(rows: Sequence[NodeRow], cores: int) -> str:
    """A cluster file for AWS, as the shipped one, with the planned nodes."""
    content = yaml.safe_load(shipped_config("cluster/aws").path.read_text(encoding="utf-8"))
    types = content["available_node_types"]
    head, router, worker = types["head"], types["router"], types["encoder"]
    types.clear()
    types["head"] = head
    for row in rows:
        base = worker if row.devices and (row.kind, row.devices) in INSTANCES else router
        resources = {"CPU": cores}
        if base is worker:
            resources["GPU"] = row.devices
        types[row.pool] = {
            "min_workers": row.nodes,
            "max_workers": row.nodes,
            "resources": resources,
            "labels": {"pool": row.pool},
            "node_config": {**base["node_config"], "InstanceType": _instance(row)},
        }
    content["max_workers"] = sum(row.nodes for row in rows)
    about = shipped_config("cluster/aws").path.read_text(encoding="utf-8").splitlines()
    notes = [line for line in about[1:6] if line.startswith("#")]
    title = "# Planned, for `ray up` on AWS; the same as the shipped cluster/aws else.\n"
    return title + "\n".join(notes) + "\n" + yaml.safe_dump(content, sort_keys=False)


def _instance(row: NodeRow) -> str:
    if not row.devices:
        return CPU_INSTANCE
    found = INSTANCES.get((row.kind, row.devices))
    if found is None:
        has = sorted(n for kind, n in INSTANCES if kind == row.kind)
        raise ConfigurationError(
            f"no AWS node with {row.devices} x {row.kind} is known here"
            + (f": use --per-node {has[0]}" if has else "")
            + ", or --provider onprem"
        )
    return found


def _role(plan: Planned, role: str, replicas: int) -> dict[str, Any]:
    design = plan.best.design
    kind = design.encoder if role == "encoder" else design.decoder
    split = design.placement == "split"
    told: dict[str, Any] = {"replicas": replicas if split else 1}
    if on_cpu(kind):
        told["device"] = "cpu"
    else:
        told |= {"device": "cuda", "gpus": 1}
    told["node_labels"] = {"pool": role if split else "worker"}
    return told


def _header(plan: Planned, what: str) -> str:
    cells = plan.best.cells
    each = f" One of {cells} cells, each of which gets this." if cells > 1 else ""
    asked = ", ".join(map(str, plan.order.objectives))
    return (
        f"# Planned {what}: {plan.order.load.rate_per_s:g} requests a second, {asked}.{each}\n"
        "# Figures: plan.json. Clients' keys: router.api_key_file.\n"
    )

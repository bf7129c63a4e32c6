"""Writes a plan: Serve configuration, cluster file, figures, and the scenario of its check.

The YAML files are read back by the checks with which `splitscribe deploy` and `splitscribe up`
begin.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.cli.config import shipped_config
from cluster.cli.operate.files import read_cluster_file, read_serve_file
from cluster.common.errors import ConfigurationError
from cluster.planning.design import NodeRow, Nodes
from cluster.planning.plan import Planned
from cluster.planning.profile import save_profile

HEAD = ipaddress.ip_address("10.0.0.10")  # examples; the operator writes the real ones
MODELS = {
    "large-v3": "openai/whisper-large-v3",
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
}


def write_plan(plan: Planned, figures: dict[str, Any], folder: Path) -> list[Path]:
    """All files, checked; the folder is made. The YAML files are of one cell.

    Raises:
        ConfigurationError: a file cannot be written.
    """
    order, size = plan.order, plan.best.size
    scenario = plan.check.outcome.scenario
    again = scenario.model_dump(mode="json", exclude={"settings"}) | {"profile": "profile.json"}
    again["settings"] = scenario.settings.model_dump(mode="json", exclude_defaults=True)
    cells = f" One of {size.cells} cells, each of which gets this." if size.cells > 1 else ""
    head = f"# Planned: {order.load.rate_per_s:g} requests a second, {order.asked}.{cells}\n"
    nodes = Nodes.of(order, plan.best)
    texts = {
        "serve.yaml": head + "# Clients' keys: router.api_key_file.\n" + _serve(plan, nodes),
        "cluster.yaml": head + cluster_file(nodes.rows, size.cells),
        "plan.json": json.dumps(figures, indent=1) + "\n",
        "check.yaml": "# splitscribe simulate check.yaml, in this folder: the plan's check again\n"
        + yaml.safe_dump(again, sort_keys=False),
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


def _serve(plan: Planned, nodes: Nodes) -> str:
    """For `splitscribe deploy`: its spare workers included."""
    order, design, size = plan.order, plan.best.design, plan.best.size
    model, split = design.profile().model, design.is_split
    settings = plan.check.outcome.scenario.settings
    spare = order.spare_nodes * order.per_node
    args: dict[str, Any] = {
        "model": MODELS.get(model, model),
        "placement": design.placement,
        "handoff": design.handoff,
        "router": {
            "replicas": nodes.routers // size.cells,
            "audio_workers": nodes.audio_workers,
            "max_pending_audio_s": round(settings.router.max_pending_audio_s, 1),
            "node_labels": {"pool": "!head" if nodes.routers_beside_workers else "router"},
        },
    }
    for role, kind, workers in (
        ("encoder", design.encoder, size.encoders),
        ("decoder", design.decoder, size.decoders),
    ):
        args[role] = {
            "replicas": workers + spare if split else 1,
            "node_labels": {"pool": role if split else "worker"},
            "device": "cpu" if kind.on_cpu else "cuda",
            **({} if kind.on_cpu else {"gpus": 1}),
        }
    application = {
        "name": "splitscribe",
        "route_prefix": "/",
        "import_path": "cluster.serve.from_file:build",
        "args": args,
    }
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000, "keep_alive_timeout_s": 90},
        "logging_config": {"log_level": "WARNING", "enable_access_log": False},
        "applications": [application],
    }
    return yaml.safe_dump(content, sort_keys=False)


def cluster_file(rows: Sequence[NodeRow], cells: int) -> str:
    """A cell's machines, in the shipped cluster/onprem, with example addresses."""
    text = shipped_config("cluster/onprem").path.read_text(encoding="utf-8")
    # A cell of one colocated worker has one node with one device.
    pools = [row.pool for row in rows for _ in range(_nodes_of_cell(row, cells))]
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
    counts = ", ".join(f"{_nodes_of_cell(row, cells)} {row.pool} ({row.kind})" for row in rows)
    if any(row.devices and not row.on_cpu for row in rows):
        before = before.replace("  # With GPUs: - ", "  - ")
    head = f"# Nodes: {counts}. The addresses are examples, here and in the table of pools.\n#\n"
    return head + before + case + "".join(cases) + end + after


def _nodes_of_cell(row: NodeRow, cells: int) -> int:
    return 1 if row.pool == "worker" else row.nodes // cells

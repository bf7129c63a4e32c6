"""The command `splitscribe config`, which shows the files under `configs/`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.cli.plain_help import PlainTyper
from cluster.common.errors import ConfigurationError
from cluster.serve.distribution import package_root

ENDINGS = (".yaml", ".Dockerfile", ".json", ".cfg", ".conf")

config = PlainTyper(
    name="config",
    help="Shipped configurations: clusters for `splitscribe up`, applications for "
    "`splitscribe deploy`, KubeRay, Dockerfiles, settings.",
    no_args_is_help=True,
)


@config.command("list")
def list_configs() -> None:
    """List the shipped configurations."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for one in shipped_configs():
        table.add_row(Text(one.name), Text(one.about))
    Console(highlight=False).print(table)


@config.command()
def show(
    name: Annotated[str, typer.Argument(help="as `config list` has it, such as cluster/onprem")],
) -> None:
    """Print one of them, to save it in a file and change it.

    Example: splitscribe config show cluster/onprem > cluster.yaml
    """
    sys.stdout.write(shipped_config(name).path.read_text())


@config.command()
def env() -> None:
    """Print, for a shell, the variables that Ray needs on every node of a cluster.

    Example: eval "$(splitscribe config env)"; ray start --head
    """
    from cluster.serve.ray_environment import ENVIRONMENT

    sys.stdout.write(shell_environment({**ENVIRONMENT, "RAY_AUTH_MODE": "token"}) + "\n")


@dataclass(frozen=True, slots=True)
class ShippedConfig:
    name: str
    path: Path
    about: str  # a sentence without its full stop


def shipped_configs() -> list[ShippedConfig]:
    root = package_root() / "configs"
    files = sorted(file for file in root.rglob("*") if file.suffix in ENDINGS)
    files = [file for file in files if file.parent.name != "templates"]  # parts of the Helm chart
    return [
        ShippedConfig(file.relative_to(root).with_suffix("").as_posix(), file, _about(file))
        for file in files
    ]


def shipped_config(name: str) -> ShippedConfig:
    """Find a file by its path below `configs/` or by its last part; its ending may be left out."""
    asked = name
    for ending in ENDINGS:
        asked = asked.removesuffix(ending)
    every = shipped_configs()
    found = [one for one in every if one.name == asked]
    found = found or [one for one in every if one.name.rpartition("/")[2] == asked]
    if len(found) != 1:
        names = ", ".join(one.name for one in found or every)
        what = "several are" if found else "no shipped configuration is"
        raise ConfigurationError(f"{what} called {name!r}; there are: {names}")
    return found[0]


def _about(file: Path) -> str:
    """The first sentence of the comment at its top; of JSON the title."""
    if file.suffix == ".json":
        return f"Grafana dashboard {json.loads(file.read_text())['title']!r}"
    lines = []
    for line in file.read_text().splitlines():
        if not line.startswith("#") or line == "#":
            break
        lines.append(line.removeprefix("#").strip())
    sentence, _, _ = " ".join(lines).partition(". ")
    return sentence.rstrip(".")


def shell_environment(variables: Mapping[str, str]) -> str:
    folder = Path(sys.executable).parent
    lines = [f'export PATH={shlex.quote(str(folder))}:"$PATH"']
    lines += [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    return "\n".join(lines)

"""`splitscribe config`: the shipped configurations on the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.cli.shipped import shell_environment, shipped_config, shipped_configs

config = typer.Typer(
    name="config",
    help="Shipped configurations: clusters for `splitscribe up`, applications for "
    "`splitscribe deploy`, KubeRay, Dockerfiles, settings.",
    no_args_is_help=True,
)


@config.command("list")
def list_configs() -> None:
    """Tell which configurations are shipped."""
    table = Table(box=None, padding=(0, 2), show_header=False)
    for one in shipped_configs():
        table.add_row(Text(one.name), Text(one.about))
    Console(highlight=False).print(table)


@config.command()
def show(
    name: Annotated[str, typer.Argument(help="as `config list` has it, such as cluster/onprem")],
) -> None:
    """Print one of them, to be written into a file and changed.

    Example: splitscribe config show cluster/onprem > cluster.yaml
    """
    sys.stdout.write(shipped_config(name).path.read_text())


@config.command()
def env() -> None:
    """Print the environment that every node of a cluster starts Ray in, for a shell.

    Example: eval "$(splitscribe config env)"; ray start --head
    """
    from cluster.serve.ray_environment import ENVIRONMENT

    sys.stdout.write(shell_environment({**ENVIRONMENT, "RAY_AUTH_MODE": "token"}) + "\n")

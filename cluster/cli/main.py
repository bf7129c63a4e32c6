"""The command line. Each command is imported when it is chosen, so that all of them start quickly.

A SplitscribeError is printed as one line; any other exception keeps its traceback.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.plain_help import Listed, ListedGroup, PlainTyper
from cluster.common.errors import SplitscribeError

CLUSTERS, PLANNING = "Clusters of several machines", "Planning"
COMMANDS = {  # each summary is the first sentence of the command's docstring
    "serve": Listed(
        "cluster.cli.serve",
        "Start the cluster in the foreground and answer OpenAI's clients",
    ),
    "transcribe": Listed(
        "cluster.cli.transcribe.command",
        "Transcribe files, in this process or through a running server",
    ),
    "align": Listed("cluster.cli.align", "Find when each word of a known text is said"),
    "batch": Listed(
        "cluster.cli.batch.command",
        "Transcribe an archive: files, folders, buckets and manifests",
    ),
    "pull": Listed(
        "cluster.cli.pull",
        "Download models into the cache of all commands, which then start without a network",
    ),
    "demo": Listed(
        "cluster.demo.showcase",
        "Start a cluster on this machine, transcribe three bundled recordings, show the texts, "
        "stop",
    ),
    "check": Listed(
        "cluster.cli.check",
        "Show what this machine has, and which device and transport a cluster would use here",
    ),
    "up": Listed(
        "cluster.cli.operate.commands",
        "Launch a cluster with `ray up`, and wait until every pool has its nodes",
        CLUSTERS,
    ),
    "deploy": Listed(
        "cluster.cli.operate.commands",
        "Deploy a Serve configuration, and wait until every worker is ready",
        CLUSTERS,
    ),
    "status": Listed(
        "cluster.cli.operate.commands",
        "Show what runs: nodes of each pool, workers, what they wait for, the URL",
        CLUSTERS,
    ),
    "down": Listed(
        "cluster.cli.operate.commands",
        "Stop the application, then take the cluster down with `ray down`",
        CLUSTERS,
    ),
    "config": Listed(
        "cluster.cli.config",
        "Shipped configurations: clusters for `splitscribe up`, applications for "
        "`splitscribe deploy`, KubeRay, Dockerfiles, settings",
        CLUSTERS,
    ),
    "profile": Listed(
        "cluster.cli.planning",
        "Measure how long each step of the work takes here, for `splitscribe simulate`",
        PLANNING,
    ),
    "simulate": Listed(
        "cluster.cli.planning",
        "Simulate a cluster under a load: the server's own policies on a virtual clock",
        PLANNING,
    ),
    "plan": Listed(
        "cluster.cli.planning",
        "Find the cheapest cluster that meets an objective, and print the file that deploys it",
        PLANNING,
    ),
}


class _Group(ListedGroup):
    listed = COMMANDS


app = PlainTyper(
    cls=_Group,
    name="splitscribe",
    help="Disaggregated encoder/decoder serving for Whisper speech-to-text.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"splitscribe {version('splitscribe')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="print the version", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


def main() -> None:
    try:
        app()
    except SplitscribeError as error:
        err = Console(stderr=True, highlight=False, soft_wrap=True)
        err.print(f"splitscribe: {error.message}", style="red", markup=False)
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The commands `splitscribe up`, `deploy`, `status` and `down`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.cli.operate import steps
from cluster.cli.operate.dashboard import Dashboard, reach
from cluster.cli.operate.files import (
    ClusterFile,
    ServeFile,
    check_sources,
    ensure_token,
    http_port,
    read_cluster_file,
    read_serve_file,
)
from cluster.common.errors import ConfigurationError
from cluster.serve.start.readiness import health_line, state_of, wait_for_health

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

HEALTH_S = 60.0  # from running replicas to the first 200 of /health

ClusterArgument = Annotated[Path, typer.Argument(help="cluster file, in the format of `ray up`")]
ClusterOption = Annotated[
    Path | None,
    typer.Option(
        "--cluster", help="cluster file; Ray's dashboard on its head is then reached through ssh"
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="URL of Ray's dashboard, reached without ssh [RAY_DASHBOARD_ADDRESS, http://127.0.0.1:8265]",
    ),
]


class _Progress:
    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, line: str) -> None:
        err.print(Text(f"{time.monotonic() - self._started:6.1f} s  ", "dim").append(line, "none"))


def up(
    cluster: ClusterArgument,
    serve: Annotated[
        Path | None, typer.Option("--serve", help="deploy this Serve configuration afterwards")
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option(
            "--timeout",
            help="longest wait in seconds for the nodes, and for the workers, to be ready",
        ),
    ] = 1200.0,
) -> None:
    """Launch a cluster with `ray up`, and wait until every pool has its nodes.

    Checks the file first, and makes the cluster's token (~/.ray/auth_token) where there is none.
    Run it again after a change: it updates a cluster that is up, and restarts Ray there.

    Example: splitscribe config show cluster/onprem > cluster.yaml; splitscribe up cluster.yaml
    """
    progress = _Progress()
    file = read_cluster_file(cluster)
    application = read_serve_file(serve) if serve is not None else None
    if ensure_token():
        progress.say("made the cluster's token: ~/.ray/auth_token")
    check_sources(file)
    progress.say(f"launching: ray up {cluster}")
    steps.run_ray_up(file)
    with reach(file, None) as dashboard:
        progress.say("the head is up; it sets up the other nodes")
        steps.wait_for_nodes(file, dashboard, timeout_s, progress.say)
        if application is not None:
            _deploy(dashboard, file, application, timeout_s, progress)
            return
    progress.say("every node is there")
    out.print(f"  next       splitscribe deploy SERVE.yaml --cluster {cluster}", markup=False)
    out.print(f"  dashboard  ray dashboard {cluster}, then http://127.0.0.1:8265", markup=False)
    out.print("             its token: ray get-auth-token", markup=False)


def deploy(
    config: Annotated[
        Path, typer.Argument(help="Serve configuration, in the format of `serve deploy`")
    ],
    cluster: ClusterOption = None,
    address: AddressOption = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", help="longest wait in seconds for every worker to be ready"),
    ] = 1200.0,
) -> None:
    """Deploy a Serve configuration, and wait until every worker is ready.

    Checks the file and its settings first, tells how many workers of each pool run and what the
    others wait for, and ends with the URL. Deploying a changed file updates what runs, worker by
    worker; a version that fails leaves the old one serving.

    Example: splitscribe config show serve/cpu > serve.yaml; splitscribe deploy serve.yaml
    """
    progress = _Progress()
    file = read_cluster_file(cluster) if cluster is not None else None
    application = read_serve_file(config)
    with reach(file, address) as dashboard:
        _deploy(dashboard, file, application, timeout_s, progress)


def _deploy(
    dashboard: Dashboard,
    file: ClusterFile | None,
    application: ServeFile,
    timeout_s: float,
    progress: _Progress,
) -> None:
    from cluster.cli.foreground import curl_line

    if not application.settings.router.api_key_file:
        progress.say("no router.api_key_file: whoever reaches the port is served")
    url = steps.api_url(dashboard, file, application.port)
    steps.deploy(dashboard, application, url, timeout_s, progress.say)
    if wait_for_health(url, HEALTH_S, progress.say):
        out.print(f"splitscribe: ready at {url}", style="bold green", markup=False)
    else:
        out.print(
            f"splitscribe: every worker runs, but {url} does not answer 200 from here: is the port "
            f"open in the firewall or security group, and http_options.host 0.0.0.0?",
            style="yellow",
            markup=False,
        )
    out.print(f"  try        {curl_line(url, application.settings)}", markup=False)


def status(cluster: ClusterOption = None, address: AddressOption = None) -> None:
    """Show what runs: nodes of each pool, workers, what they wait for, the URL.

    The exit status is 0 if the API takes requests, otherwise 1.

    Example: splitscribe status --cluster cluster.yaml
    """
    file = read_cluster_file(cluster) if cluster is not None else None
    table, is_serving = Table(box=None, padding=(0, 2), show_header=False), False
    with reach(file, address) as dashboard:
        nodes, details = dashboard.nodes(), dashboard.serve()
        for node in sorted(nodes, key=lambda node: (not node.is_head, node.pool, node.address)):
            table.add_row("node", node.pool, node.address)
        if file is not None and not steps.all_there(file, nodes):
            table.add_row("nodes", "[yellow]missing[/]", steps.pools_line(file, nodes))
        if (state := state_of(details)) is None:
            table.add_row("application", "[yellow]none[/]", "splitscribe deploy SERVE.yaml")
        else:
            table.add_row("application", _coloured(state.is_ready), state.status)
            for pool in state.pools:
                waits = f": {pool.waits_for}" if pool.waits_for else ""
                said = Text(f"{pool.running} of {pool.wanted} running{waits}")
                table.add_row(pool.name, _coloured(pool.is_ready), said)
            url = steps.api_url(dashboard, file, http_port(details))
            is_serving, health = health_line(url)
            table.add_row("api", _coloured(is_serving), Text(f"{url}: {health}"))
    out.print(table)
    raise typer.Exit(0 if is_serving else 1)


def _coloured(is_well: bool) -> str:
    return "[green]ready[/]" if is_well else "[yellow]not ready[/]"


def down(
    cluster: ClusterArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask for confirmation")] = False,
) -> None:
    """Stop the application, then take the cluster down with `ray down`.

    Workers finish what they have. In a cloud the machines are ended; machines of your own get
    `ray stop`, each of them, which `ray down` alone does on the head only.

    Example: splitscribe down cluster.yaml
    """
    file = read_cluster_file(cluster)
    if not yes:
        typer.confirm(f"Take down the cluster of {cluster}?", abort=True)
    progress = _Progress()
    try:
        with reach(file, None) as dashboard:
            steps.stop_serving(dashboard, progress.say)
    except ConfigurationError as error:
        progress.say(f"the application was not stopped by itself: {error.message}")
    progress.say(f"taking down: ray down {cluster}")
    steps.run_ray_down(file, progress.say)
    progress.say("nothing is left")

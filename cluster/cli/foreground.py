"""`splitscribe serve`: run a cluster until the person at the terminal ends it."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.serve.ray_internals import KEEP_SIGNALS
from cluster.serve.start.launch import running_cluster


def serve_foreground(
    settings: Settings, ray_address: str | None, console: Console, stop: threading.Event
) -> None:
    """Start, print how to call it, wait for `stop`, which may come at any time, and stop cleanly.

    The cluster has a thread of its own: in the main thread Ray would take SIGTERM for itself.

    Raises:
        ConfigurationError, CheckpointError: before or while starting.
    """
    for own in settings.by_model().values():
        open_checkpoint(own.model)  # a wrong model is told now, not by a replica's log
    os.environ.setdefault(KEEP_SIGNALS, "1")
    with ThreadPoolExecutor(1, "cluster") as threads:
        threads.submit(_serve, settings, ray_address, console, stop).result()


def _serve(
    settings: Settings, ray_address: str | None, console: Console, stop: threading.Event
) -> None:
    def say(line: str) -> None:
        # Where the terminal has gone, rich would end the process before the cluster is stopped.
        with contextlib.suppress(OSError, SystemExit):
            console.print(f"splitscribe: {line}", markup=False)

    is_ready = False
    try:
        with running_cluster(
            settings, say=say, address=ray_address, log_to_driver=True, stop=stop
        ) as cluster:
            is_ready = True
            console.print(f"splitscribe: ready at {cluster.url}", style="bold green", markup=False)
            console.print(f"  placement  {cluster.placement}", markup=False)
            if cluster.dashboard_url:
                console.print(
                    f"  dashboard  {cluster.dashboard_url}  (its token: ray get-auth-token)",
                    markup=False,
                )
            if cluster.settings.router.shows_page:
                console.print(f"  page       {cluster.url}/  (open it in a browser)", markup=False)
            console.print(f"  try        {curl_line(cluster.url, cluster.settings)}", markup=False)
            stop.wait()
    except Exception:
        # A start also fails where Ctrl-C, which a terminal sends to Ray's processes too, ended one.
        if is_ready or not stop.is_set():
            raise
        say("stopped before it was ready")


def curl_line(url: str, settings: Settings) -> str:
    """A command that a newcomer can paste."""
    from cluster.demo.samples import sample_path

    has_keys = settings.router.api_key or settings.router.api_key_file
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if has_keys else ""
    return (
        f"curl {url}/v1/audio/transcriptions{key} "
        f"-F model=whisper-1 -F file=@{sample_path('short')}"
    )

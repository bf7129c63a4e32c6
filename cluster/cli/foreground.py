"""`splitscribe serve`: run a cluster until the person at the terminal ends it."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from rich.console import Console

from cluster.model.checkpoint import open_checkpoint
from cluster.serve.launch import running_cluster
from cluster.settings import Settings


def serve_foreground(settings: Settings, ray_address: str | None, console: Console) -> None:
    """Start, print how to call it, wait for Ctrl-C or SIGTERM, stop cleanly.

    Raises:
        ConfigurationError, CheckpointError: before or while starting.
    """
    for own in settings.by_model().values():
        open_checkpoint(own.model)  # a wrong model is told now, not by a replica's log
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    with running_cluster(
        settings,
        say=lambda line: console.print(f"splitscribe: {line}", markup=False),
        address=ray_address,
        log_to_driver=True,
    ) as cluster:
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, on_signal)
        console.print(f"splitscribe: ready at {cluster.url}", style="bold green", markup=False)
        console.print(f"  placement  {cluster.placement}", markup=False)
        if cluster.dashboard_url:
            console.print(
                f"  dashboard  {cluster.dashboard_url}  (its token: ray get-auth-token)",
                markup=False,
            )
        console.print(f"  try        {curl_line(cluster.url, cluster.settings)}", markup=False)
        stop.wait()


def curl_line(url: str, settings: Settings) -> str:
    """A command that a newcomer can paste."""
    from cluster.demo.samples import sample_path

    has_keys = settings.router.api_key or settings.router.api_key_file
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if has_keys else ""
    return (
        f"curl {url}/v1/audio/transcriptions{key} "
        f"-F model=whisper-1 -F file=@{sample_path('short')}"
    )

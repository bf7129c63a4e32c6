"""`splitscribe serve` in the foreground: run a cluster until a signal ends it.

A Python signal handler interrupts the main thread, which may hold any lock. So the handlers do
nothing: the interpreter writes the signal's number into a pipe, and a thread reads it and acts.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

from rich.console import Console

from cluster.cli.default_model import say_if_toy
from cluster.cli.stderr_lines import OWN, JsonLines, WorkerLines, json_error, json_line
from cluster.common.logs import LogEncoding
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.serve.ray_internals import KEEP_SIGNALS
from cluster.serve.start.launch import running_cluster
from cluster.serve.start.readiness import StopRequest


def serve_foreground(
    settings: Settings, console: Console, stop: StopRequest, *, verbose: bool = False
) -> None:
    """Run the cluster until `stop` is set, in a thread of its own: in the main thread Ray would
    handle SIGTERM.

    verbose: also show what Ray and Serve log. Raises ConfigurationError or CheckpointError; where
    log lines are JSON, SystemExit.
    """
    is_json = settings.log_format == "json"
    if is_json:
        console = Console(file=JsonLines(), force_terminal=False, highlight=False, soft_wrap=True)
    with json_error() if is_json else contextlib.nullcontext():
        for own in settings.by_model().values():
            open_checkpoint(own.model)  # a wrong model fails here, not in a replica
        say_if_toy({own.model for own in settings.by_model().values()}, console)
        os.environ.setdefault(KEEP_SIGNALS, "1")
        is_quiet = console.is_terminal and not verbose
        workers = WorkerLines(is_quiet=is_quiet, all_of_serve=verbose)
        with ThreadPoolExecutor(1, "cluster") as threads:
            threads.submit(_serve, settings, console, stop, workers).result()


def _serve(settings: Settings, console: Console, stop: StopRequest, workers: WorkerLines) -> None:
    began_s, n_said = time.monotonic(), 0

    def say(line: str) -> None:
        nonlocal n_said
        n_said += 1
        is_soon = time.monotonic() - began_s < PATIENCE_S and not stop.is_set()
        if workers.is_quiet and is_soon and n_said > 1:
            return
        # Rich raises SystemExit where the terminal has gone, but the cluster must still be stopped.
        with contextlib.suppress(OSError, SystemExit):
            console.print(f"{OWN}{line}", markup=False)

    is_ready = False
    try:
        with running_cluster(settings, say=say, worker_lines=workers.take, stop=stop) as cluster:
            is_ready, workers.is_quiet = True, False
            page = "  (open it in a browser)" if cluster.settings.router.shows_page else ""
            console.print(f"{OWN}ready at {cluster.url}{page}", style="bold green", markup=False)
            if cluster.dashboard_url:
                console.print(
                    f"  dashboard  {cluster.dashboard_url}  (its token: ray get-auth-token)",
                    markup=False,
                )
            console.print(f"  try  {curl_line(cluster.url, cluster.settings)}", markup=False)
            from cluster.serve.start.ray_session import end_without_ray, ray_watch

            if ray_watch(stop)():
                say(f"Ray has ended, and all workers with it; look into {RAY_LOGS}")
                end_without_ray(GAVE_UP)
    except Exception:
        # A terminal sends Ctrl-C to Ray's processes too, and the start fails where it ends one.
        # `StopSignals` has printed already that the start was stopped.
        if is_ready or not stop.is_set():
            raise


def curl_line(url: str, settings: Settings) -> str:
    from cluster.demo.samples import sample_path

    has_keys = settings.router.api_key or settings.router.api_key_file
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if has_keys else ""
    return (
        f"curl {url}/v1/audio/transcriptions{key} "
        f"-F model=whisper-1 -F file=@{sample_path('short')}"
    )


SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 10.0  # at a terminal, until the start prints its progress
STOP_LIMIT_S = 90.0  # replicas get 60 s to finish the windows in work
CLOSED = 0  # the byte that ends the reading thread; no signal has this number
GAVE_UP = 1  # the exit status where stopping took too long, or Ray has ended
RAY_LOGS = "/tmp/ray/session_latest/logs"
STOPPED = "stopped before it was ready"


class StopSignals:
    """While open, the first signal sets the event and starts the time limit.

    Later signals are ignored, after exit too, so that none changes the exit status.
    """

    def __init__(
        self,
        limit_s: float = STOP_LIMIT_S,
        give_up: Callable[[int], object] = os._exit,
        encoding: LogEncoding = "plain",
    ) -> None:
        self._limit_s = limit_s
        self._give_up = give_up
        self._is_json = encoding == "json"
        self._asked = StopRequest()
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)

    def __enter__(self) -> StopRequest:
        """Return the event that a signal sets. Only the main thread may call this."""
        self._terminal = os.dup(2)  # the cluster's shutdown silences the usual descriptors
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._former_fd = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
        self._thread.start()
        return self._asked

    def __exit__(self, *exception: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_IGN if self._asked.is_set() else former)
        signal.set_wakeup_fd(self._former_fd)
        os.write(self._writing, bytes([CLOSED]))
        self._thread.join()
        for descriptor in (self._reading, self._writing, self._terminal):
            os.close(descriptor)

    def _read(self) -> None:
        deadline_s: float | None = None
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([self._reading], [], [], left_s)[0]:
                self._tell(f"not stopped within {self._limit_s:.0f} s: ending the process now")
                self._give_up(GAVE_UP)
                return
            for number in os.read(self._reading, 64):
                if number == CLOSED:
                    return
                if number in SIGNALS and deadline_s is None:
                    deadline_s = time.monotonic() + self._limit_s
                    self._asked.set()
                    if (leave := self._asked.leave) is not None:
                        self._tell(STOPPED)
                        leave()
                        self._give_up(0)
                        return
                    self._tell(
                        f"{signal.Signals(number).name}: stopping, which ends within "
                        f"{self._limit_s:.0f} s; another signal changes nothing"
                    )

    def _tell(self, line: str) -> None:
        text = json_line("INFO", line) if self._is_json else f"{OWN}{line}\n"
        with contextlib.suppress(OSError):  # the terminal may have gone
            os.write(self._terminal, text.encode())


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The interpreter writes into the pipe only for signals that have a handler."""

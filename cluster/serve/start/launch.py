"""Start Ray, Serve and the application on this machine, and stop them.

Paths are resolved before the process changes to an empty run folder, because Ray puts the driver's
working directory first on a worker's import path.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from shutil import rmtree
from typing import Any

import psutil

from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.serve.distribution import build_id, package_root
from cluster.serve.placement import Placement, place, this_machine
from cluster.serve.ray_environment import APP_NAME, ENVIRONMENT
from cluster.serve.start.readiness import (
    SERVE_LOGS,
    SOON_S,
    Say,
    StopRequest,
    check_stop,
    wait_for_health,
    wait_for_replicas,
)
from cluster.serve.start.resolve import resolve_settings

KILLS = 20  # attempts to kill all children, as another thread may go on starting some

Build = Callable[[Settings, str, Placement], Any]  # as `cluster.serve.app.build_app`


@dataclass(frozen=True, slots=True)
class RunningCluster:
    url: str
    dashboard_url: str | None
    settings: Settings
    placement: Placement


@contextmanager
def running_cluster(
    settings: Settings,
    *,
    say: Say = lambda line: None,
    ready_timeout_s: float = 180.0,
    worker_lines: Callable[[object, list[str]], None] | None = None,
    build: Build | None = None,
    stop: StopRequest | None = None,
) -> Iterator[RunningCluster]:
    """Start the application, yield once `/health` is 200, and stop everything afterwards.

    say: called with progress, a line at a time. worker_lines: called with a worker process and the
    lines that it printed. stop: ends the start at its next step when another thread sets it.

    Raises ConfigurationError: the settings do not fit, or the pools are not ready in time.
    StartCancelled: `stop` was set.
    """
    package_root()
    stop = stop or StopRequest()
    settings = resolve_settings(settings)
    placement = place(settings, this_machine())  # raises its errors before Ray starts
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from cluster.serve.start.ray_session import ray_session, run_folder

    # The application's modules take a second to import, while Ray's processes start.
    imports = threading.Thread(target=_import_application, name="imports", daemon=True)
    imports.start()
    with run_folder() as folder:
        stop.leave = partial(_leave, folder)
        models = ", ".join(one.model for one in settings.by_model().values())
        say(f"starting {models}: {placement}")
        check_stop(stop)
        with ray_session(None, settings.ray_dashboard, worker_lines) as context:
            check_stop(stop)
            imports.join()
            from cluster.serve.app import build_app

            app = (build or build_app)(settings, build_id(), placement)
            with _application(app, settings, say, stop):
                url = f"http://{_client_host(settings.router.host)}:{settings.router.port}"
                if not wait_for_health(url, ready_timeout_s, say, stop, SOON_S):
                    raise ConfigurationError(
                        f"the pools were not ready after {ready_timeout_s:.0f} s; look at the "
                        f"replicas' logs under {SERVE_LOGS}"
                    )
                stop.leave = None
                dashboard = f"http://{context.dashboard_url}" if context.dashboard_url else None
                yield RunningCluster(url, dashboard, settings, placement)


def _leave(folder: str) -> None:
    threading.excepthook = lambda _: None  # Ray's threads lose their connections
    kill_children(psutil.Process())
    rmtree(folder, ignore_errors=True)


def kill_children(process: psutil.Process) -> None:
    for _ in range(KILLS):
        children = process.children(recursive=True)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        if not children:
            return
        psutil.wait_procs(children, timeout=1.0)


def _import_application() -> None:
    with suppress(Exception):  # the next import raises it again
        for name in ("cluster.serve.preload", "cluster.serve.app"):
            import_module(name)


@contextmanager
def _application(app: Any, settings: Settings, say: Say, stop: threading.Event) -> Iterator[None]:
    from ray import serve

    from cluster.serve.start.ray_session import stop_application

    encoding = {"encoding": "JSON" if settings.log_format == "json" else "TEXT"}
    serve.start(
        proxy_location="Disabled" if settings.router.listener == "router" else None,
        http_options={"host": settings.router.host, "port": settings.router.port},
        logging_config={
            "log_level": _serve_level(settings),
            "enable_access_log": False,
            **encoding,
        },
    )
    try:
        check_stop(stop)
        serve.run_many(
            [serve.RunTarget(app, APP_NAME, "/", logging_config=encoding)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        wait_for_replicas(say, stop)
        yield
    finally:
        say("shutting down")
        stop_application(has_proxies=settings.router.listener != "router")


def _serve_level(settings: Settings) -> str:
    # Serve's INFO lines appear with our DEBUG.
    return {"DEBUG": "INFO", "INFO": "WARNING"}.get(settings.log_level, settings.log_level)


def _client_host(host: str) -> str:
    """Return the URL's host with which this machine reaches a listener on `host`."""
    if ":" in host:
        return "[::1]" if host == "::" else f"[{host}]"
    return "127.0.0.1" if host in ("0.0.0.0", "") else host

"""Start and stop one cluster on this machine: Ray, Serve, the application, readiness.

Used by `splitscribe serve` and `splitscribe demo`, and by the end-to-end tests. Resolves every
path before it moves to an empty run folder, because Ray puts the driver's working directory
first on a worker's import path.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from cluster.errors import ConfigurationError
from cluster.serve.distribution import build_id, package_root
from cluster.serve.network import ray_on_loopback
from cluster.serve.placement import Placement, joined_machine, place, this_machine
from cluster.settings import Listener, Settings
from cluster.settings_sources import read_api_keys

APP_NAME = "splitscribe"
MAX_MESSAGE_BYTES = 256 * 1024 * 1024  # one upload crosses proxy -> router in such messages
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # audio and KV do not pass through it

ENVIRONMENT = {
    # One event loop per replica, gRPC between them: 4 to 5 times the requests/s of the default.
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(MAX_MESSAGE_BYTES),
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # the optimised mode forgets the way from proxy to router
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",  # HAProxy alone needs it, and turns it on itself
    # Replicas are drained by our own rule; this one waits for load balancers that are not there.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # What is frozen is ended, not drained for a minute: who waits for it goes on elsewhere at once.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",  # a busy one is no dead one: many go through it
    # A machine that is silent for 15 to 20 s is gone, by default after a minute. Its workers are
    # replaced before, by their own checks; sooner, and a short break of the network would end Ray.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "6",
    # Also how long TCP waits for what it has sent, so that a call to a vanished machine ends: Serve
    # asks no more of a connection, and a router would wait there until its request's deadline.
    "RAY_grpc_client_keepalive_timeout_ms": "6000",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # a killed worker's last lines are wanted
    "OMP_WAIT_POLICY": "PASSIVE",  # both roles may use every core; only one works at a time
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}

Say = Callable[[str], None]
Build = Callable[[Settings, str, Placement], Any]  # as `cluster.serve.app.build_app`


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """Where a started cluster answers."""

    url: str
    dashboard_url: str | None
    settings: Settings
    placement: Placement


def resolve_settings(settings: Settings, address: str | None = None) -> Settings:
    """Fill in what must be the same in every process: keys, port, listener, model paths.

    Args:
        address: as of `running_cluster`.

    Raises:
        ConfigurationError: the port is taken, the file of API keys cannot be read, or routers
            that may be on any machine of a cluster are to listen themselves.
    """
    port = settings.router.port or _free_port(settings.router.host)
    _check_port(settings.router.host, port)
    return resolved(
        settings,
        cluster_key=settings.cluster_key or secrets.token_hex(32),
        port=port,
        listener=_listener(settings.router.listener, address),
    )


def resolved(settings: Settings, *, cluster_key: str, port: int, listener: Listener) -> Settings:
    """`settings` with these, with the API keys of their file, and with models' folders absolute.

    Raises:
        ConfigurationError: the file of API keys cannot be read.
    """
    router = settings.router
    keys = router.api_key
    if router.api_key_file is not None:
        keys = (*keys, *read_api_keys(router.api_key_file))
    models = {
        name: one.model_copy(update={"model": _absolute(one.model)})
        for name, one in settings.models.items()
    }
    return settings.model_copy(
        update={
            "model": _absolute(settings.model),
            "models": models,
            "cluster_key": cluster_key,
            "router": router.model_copy(
                update={
                    "port": port,
                    "listener": listener,
                    "api_key": keys,
                    "api_key_file": None,
                }
            ),
        }
    )


def _listener(asked: Listener, address: str | None) -> Listener:
    if asked == "auto":
        return "router" if address is None else "serve"
    if asked == "router" and address is not None:
        raise ConfigurationError(
            "router.listener 'router' is for a cluster on one machine, which is not joined by its "
            "address; 'serve' puts Ray Serve's proxies in front of routers on many"
        )
    return asked


def _absolute(model: str) -> str:
    """The model's folder, if it is one, from wherever a process looks."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


@contextmanager
def running_cluster(
    settings: Settings,
    *,
    say: Say = lambda line: None,
    address: str | None = None,
    ready_timeout_s: float = 180.0,
    log_to_driver: bool = False,
    build: Build | None = None,
) -> Iterator[RunningCluster]:
    """Start the application, yield once `/health` is 200, and take everything down after.

    Args:
        settings: resolved here; see `resolve_settings`.
        say: told one line per stage.
        address: of a running Ray cluster to join; None starts Ray on this machine.
        build: composes the application; None: `cluster.serve.app.build_app`.

    Raises:
        ConfigurationError: something does not fit, or the pools are not ready in time.
    """
    package_root()
    settings = resolve_settings(settings, address)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _put_packages_on_path()
    home = Path.cwd()
    run_dir = Path(tempfile.mkdtemp(prefix="splitscribe-run-"))
    os.chdir(run_dir)
    started = False
    try:
        import ray
        from ray import serve

        from cluster.serve.app import build_app

        # What cannot be is told before Ray starts, where the GPUs are this machine's.
        placement = place(settings, this_machine()) if address is None else None
        say("starting Ray" if address is None else f"joining Ray at {address}")
        context = _start_ray(ray, address, log_to_driver)
        started = True
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        if placement is None:
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            n_gpus = resources.get("GPU", 0.0)
            placement = place(settings, joined_machine(n_gpus))
        say(f"starting router, encoder and decoder workers; placement: {placement}")
        serve.start(
            proxy_location="Disabled" if settings.router.listener == "router" else None,
            http_options={"host": settings.router.host, "port": settings.router.port},
            logging_config={"log_level": _serve_level(settings), "enable_access_log": False},
        )
        with _telling_progress(say):
            _deploy(serve, (build or build_app)(settings, build_id(), placement))
        url = f"http://{_client_host(settings.router.host)}:{settings.router.port}"
        _wait_ready(url, ready_timeout_s, say)
        dashboard = context.dashboard_url
        yield RunningCluster(url, f"http://{dashboard}" if dashboard else None, settings, placement)
    finally:
        if started:
            say("shutting down")
            _stop(address is None)
        os.chdir(home)
        shutil.rmtree(run_dir, ignore_errors=True)


def _serve_level(settings: Settings) -> str:
    """Serve's own lines are for those who look for them: its INFO is our DEBUG."""
    return {"DEBUG": "INFO", "INFO": "WARNING"}.get(settings.log_level, settings.log_level)


def _start_ray(ray: Any, address: str | None, log_to_driver: bool) -> Any:
    common: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": log_to_driver,
        "configure_logging": True,
    }
    try:
        if address is not None:
            return ray.init(address=address, **common)
        with ray_on_loopback():
            return ray.init(
                address="local",
                include_dashboard=True,
                object_store_memory=OBJECT_STORE_BYTES,
                **common,
            )
    except Exception as error:
        raise ConfigurationError(f"Ray did not start: {error}") from error


def _deploy(serve: Any, app: Any) -> None:
    """Deploy and wait until every replica runs."""
    try:
        serve.run(app, name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise ConfigurationError(
            f"the cluster did not start: {_reason(serve) or error}; "
            f"more in /tmp/ray/session_latest/logs/serve"
        ) from error


def _reason(serve: Any) -> str:
    """The last line of what the first deployment that failed says of itself."""
    application = serve.status().applications.get(APP_NAME)
    for name, deployment in (application.deployments if application else {}).items():
        if deployment.status != "HEALTHY" and deployment.message:
            return f"{name}: {deployment.message.strip().splitlines()[-1]}"
    return ""


@contextmanager
def _telling_progress(say: Say) -> Iterator[None]:
    """Say how many replicas of each pool run, whenever that changes."""
    from ray import serve

    done = threading.Event()

    def watch() -> None:
        last = ""
        while not done.wait(0.5):
            try:
                application = serve.status().applications.get(APP_NAME)
            except Exception:
                continue
            line = _replicas_line(application.deployments if application else {})
            if line and line != last:
                say(line)
                last = line

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _replicas_line(deployments: Any) -> str:
    parts = []
    for name, deployment in deployments.items():
        states = {str(state): n for state, n in deployment.replica_states.items()}
        running = sum(n for state, n in states.items() if state.endswith("RUNNING"))
        parts.append(f"{name} {running}/{sum(states.values())}")
    return f"workers running: {', '.join(parts)}" if parts else ""


def _stop(own_ray: bool) -> None:
    import ray
    from ray import serve

    with _silenced():  # Ray tells of every actor that it ends
        try:
            if own_ray:
                serve.shutdown()  # type: ignore[no-untyped-call]
            else:
                serve.delete(APP_NAME)
        finally:
            ray.shutdown()


@contextmanager
def _silenced() -> Iterator[None]:
    """Send what this process prints, Ray's native threads included, to nowhere."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.close(nowhere)


def _wait_ready(url: str, timeout_s: float, say: Say) -> None:
    deadline = time.monotonic() + timeout_s
    last = ""
    while time.monotonic() < deadline:
        try:
            answer = httpx.get(f"{url}/health", timeout=5.0)
            if answer.status_code == 200:
                return
            state = _pool_line(answer)
        except httpx.HTTPError:
            state = "router: starting"
        if state != last:
            say(state)
            last = state
        time.sleep(0.2)
    raise ConfigurationError(
        f"the pools were not ready after {timeout_s:.0f} s ({last}); "
        f"look at the replicas' logs under /tmp/ray/session_latest/logs/serve"
    )


def _pool_line(answer: httpx.Response) -> str:
    try:
        pools = answer.json()["pools"]
    except (ValueError, KeyError, TypeError):
        return "router: starting"
    return ", ".join(
        f"{role}: {'ready' if pool.get('ready') else 'starting'}" for role, pool in pools.items()
    )


def _put_packages_on_path() -> None:
    """Let workers of a source checkout import it; an installed wheel needs nothing."""
    root = str(package_root())
    if Path(root).name == "site-packages":
        return
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


def _client_host(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "") else host


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host or "127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port"
            ) from error

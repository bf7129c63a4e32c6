"""This process in a Ray cluster: one that it starts on this machine and ends, or a joined one.

Ray reads `cluster.serve.ray_environment` when it is imported: import this after it is set.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from cluster.common.cores import usable_cores
from cluster.common.errors import ConfigurationError
from cluster.common.settings import RayDashboard
from cluster.serve.distribution import package_root
from cluster.serve.ray_environment import APP_NAME, ONE_MACHINE_ENVIRONMENT
from cluster.serve.ray_internals import (
    DASHBOARD_PARTS,
    kill_own_ray,
    ray_on_loopback,
    raylet_pid,
    small_ray_head,
    take_worker_lines,
)
from cluster.serve.start.readiness import has_ended

TakeLines = Callable[[object, list[str]], None]  # what one process has printed
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # audio and KV do not pass through it


@contextmanager
def run_folder() -> Iterator[str]:
    """An empty folder that this process is in meanwhile: Ray imports from the one it is in."""
    name = "splitscribe-run-"
    made = tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True)
    with made as folder, chdir(folder):
        yield folder


@contextmanager
def ray_session(
    address: str | None, dashboard: RayDashboard = "none", worker_lines: TakeLines | None = None
) -> Iterator[Any]:
    """Ray's context, of a cluster at `address` or of one that lives as long as this is open.

    worker_lines: is told what workers print. Raises ConfigurationError: Ray is not there, or Serve
    does not load.
    """
    _put_packages_on_path()
    context = _start(address, dashboard, log_to_driver=worker_lines is not None)
    # An error that ends the process while it is connected is never told: Ray's hook waits for ever.
    try:
        if worker_lines is not None:
            take_worker_lines(worker_lines)
        _load_serve()
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        yield context
    finally:
        with _silenced():
            ray.shutdown(wait_for_processes=True)


def _load_serve() -> None:
    """Raises ConfigurationError: a package that it needs is missing, or of another version."""
    try:
        import ray.serve  # noqa: F401 - which sets the level of its log
    except Exception as error:
        raise ConfigurationError(f"Ray Serve does not load: {error}") from error


def _start(address: str | None, dashboard: RayDashboard, *, log_to_driver: bool) -> Any:
    logging.getLogger("ray").setLevel(logging.ERROR)  # of what it says before it reads the options
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": log_to_driver}
    try:
        if address is not None:
            # For an address of this machine alone Ray would look at the network's, where none is.
            with ray_on_loopback() if _is_loopback(address) else nullcontext():
                return ray.init(address=address, **common)
        # glibc's heaps: eight for each core by default, each with what its threads have freed.
        heaps = {"MALLOC_ARENA_MAX": str(max(2, usable_cores()))}
        for name, value in (ONE_MACHINE_ENVIRONMENT | heaps).items():
            os.environ.setdefault(name, value)
        with ray_on_loopback(), _head(dashboard):
            return ray.init(
                address="local",
                include_dashboard=True,
                object_store_memory=OBJECT_STORE_BYTES,
                **common,
            )
    except Exception as error:
        raise ConfigurationError(f"Ray did not start: {error}") from error


def _is_loopback(address: str) -> bool:
    return address.removeprefix("ray://").partition(":")[0] in ("127.0.0.1", "localhost")


def _head(dashboard: RayDashboard) -> AbstractContextManager[None]:
    if dashboard == "all":
        return nullcontext()
    return small_ray_head(DASHBOARD_PARTS if dashboard == "serve" else ())


def ray_watch(over: threading.Event) -> Callable[[], bool]:
    """`has_ended` of the cluster that this process is in."""
    head = ray.get_runtime_context().gcs_address
    return partial(has_ended, head, os.pidfd_open(raylet_pid()), over)


def end_without_ray(status: int) -> None:
    """End the process when its cluster has ended: Ray's own shutdown would wait for it."""
    kill_own_ray()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def stop_application(*, has_proxies: bool) -> None:
    """End the application once its replicas have finished what they have begun.

    has_proxies: clients are connected to Serve's proxies: `shutdown` ends proxies and replicas at
    the same time, so the replicas have to end before.
    """
    from ray import serve

    with _silenced():
        if has_proxies:
            with suppress(TimeoutError):  # after a minute they end, done or not
                serve.delete(APP_NAME)
        serve.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def _silenced() -> Iterator[None]:
    """Send what this process prints to nowhere: Ray's native threads tell of every actor's end."""
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


def _put_packages_on_path() -> None:
    """Let workers of a source checkout import it; an installed wheel needs nothing."""
    root = str(package_root())
    if Path(root).name == "site-packages":
        return
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])

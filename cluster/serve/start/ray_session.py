"""Start Ray on this machine or join a Ray cluster, and leave it.

Import this after `cluster.serve.ray_environment` is set, as Ray reads it when it is imported.
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

TakeLines = Callable[[object, list[str]], None]  # a process, and lines that it printed
OBJECT_STORE_BYTES = 256 * 1024 * 1024  # small, as no audio and no KV pass through it


@contextmanager
def run_folder() -> Iterator[str]:
    """Change to a new empty folder meanwhile, as Ray imports from the working directory."""
    name = "splitscribe-run-"
    made = tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True)
    with made as folder, chdir(folder):
        yield folder


@contextmanager
def ray_session(
    address: str | None, dashboard: RayDashboard = "none", worker_lines: TakeLines | None = None
) -> Iterator[Any]:
    """Join the Ray cluster at `address`, or start one that ends with this context.

    Yields Ray's context. Raises ConfigurationError: Ray cannot be reached, or Serve fails to load.
    """
    _put_packages_on_path()
    context = _start(address, dashboard, log_to_driver=worker_lines is not None)
    # An uncaught error in a connected process is never shown, as Ray's exception hook blocks.
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
    logging.getLogger("ray").setLevel(logging.ERROR)  # also before it reads its options
    common: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": log_to_driver}
    try:
        if address is not None:
            # For a loopback address Ray would connect to the network's, where nothing listens.
            with ray_on_loopback() if _is_loopback(address) else nullcontext():
                return ray.init(address=address, **common)
        # By default glibc has eight heaps for each core, each of which keeps freed memory.
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
    head = ray.get_runtime_context().gcs_address
    return partial(has_ended, head, os.pidfd_open(raylet_pid()), over)


def end_without_ray(status: int) -> None:
    """Exit after the cluster has ended, when Ray's shutdown would block."""
    kill_own_ray()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def stop_application(*, has_proxies: bool) -> None:
    """End the application once its replicas have finished their calls.

    has_proxies: clients are connected to Serve's proxies, which `shutdown` ends without waiting.
    """
    from ray import serve

    with _silenced():
        if has_proxies:
            with suppress(TimeoutError):  # after a minute replicas are killed
                serve.delete(APP_NAME)
        serve.shutdown()  # type: ignore[no-untyped-call]


@contextmanager
def _silenced() -> Iterator[None]:
    """Discard what this process prints, as Ray's native threads report every actor's end."""
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
    root = str(package_root())
    if Path(root).name == "site-packages":
        return
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])

"""NIXL as this project uses it: environment, import, and an agent that idles without spinning.

UCX and NIXL read the environment when they are loaded, so it is set before the import. The Python
API hard-codes a progress delay of 0, which spins a core per agent; the agent is therefore made
with a configuration class that keeps our delay. A progress thread must exist all the same: without
one on both sides no connection comes about. This module knows nothing of KV.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import logging.config
import os
import re
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from cluster.common.errors import ConfigurationError

logger = logging.getLogger(__name__)

PROGRESS_DELAY_US = 200_000  # the thread is event-driven: this bounds its idle wake-ups, no more
PACKAGES = ("nixl_cu13", "nixl", "nixl_cu12")

_ENVIRONMENT = {
    "UCX_TCP_USER_TIMEOUT": "5s",  # a partition shows in 5 to 10 s, by default in minutes
    "UCX_TCP_TX_SEG_SIZE": "256k",  # twice the bandwidth of the default
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_CMA_SEG_SIZE": "16m",  # by default 512k: four times the calls' time on 245 MB
    "NIXL_LOG_LEVEL": "ERROR",
}
# Best first: what a connection that has several of these moves bulk data by.
_LANES = ("cuda_ipc", "rc", "dc", "ud", "srd", "gdr_copy", "xpmem", "cma", "knem", "sysv", "posix")
_FAST_FOR_GPUS = frozenset(("cuda_ipc", "rc", "dc", "srd", "gdr_copy"))
_CONNECTED = re.compile(rb"UCX\s+INFO\s+(\S+) int(?:ra|er)-node cfg#\d+ (.*)")
_PROBLEM = re.compile(rb"UCX\s+(?:WARN|ERROR)\s.*")

_load_lock = threading.Lock()


def load_api() -> ModuleType:
    """Import NIXL's Python API, with the environment set first.

    Raises:
        ConfigurationError: none of its packages is installed, or it does not load here.
    """
    with _load_lock:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        problems = []
        for package in PACKAGES:
            try:
                with _logging_left_alone():
                    return importlib.import_module(f"{package}._api")
            except ImportError as error:
                problems.append(f"{package}: {error}")
        raise ConfigurationError(
            "NIXL does not load on this machine, use transport 'memory' or install nixl-cu13 "
            f"(Linux only): {'; '.join(problems)}"
        )


@contextlib.contextmanager
def _logging_left_alone() -> Iterator[None]:
    """While open, nobody configures Python's logging.

    NIXL does so when it is imported, which closes the handlers of everybody else: the replica's log
    file got nothing more, and a restarted Serve controller, which asks for that file, took the
    replica for broken and replaced it.
    """
    real = logging.config.dictConfig
    logging.config.dictConfig = lambda config: None
    try:
        yield
    finally:
        logging.config.dictConfig = real


def make_agent(name: str) -> Any:
    """A `nixl_agent` with UCX, and with a progress thread that does not spin."""
    api = load_api()
    config = api.nixl_agent_config(
        enable_prog_thread=True, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    )
    with _load_lock, _progress_delay(api), ucx_log.installed():
        return api.nixl_agent(name, config)


@contextlib.contextmanager
def _progress_delay(api: ModuleType) -> Iterator[None]:
    """While open, agents are made with PROGRESS_DELAY_US, whatever the API assigns."""
    bindings = api.nixlBind
    real = bindings.nixlAgentConfig

    class LazyConfig(real):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_DELAY_US if name == "pthrDelay" else value)

    class Bindings:
        nixlAgentConfig = LazyConfig  # noqa: N815

        def __getattr__(self, name: str) -> Any:
            return getattr(bindings, name)

    api.nixlBind = Bindings()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        api.nixlBind = bindings  # type: ignore[attr-defined]


class UcxLog:
    """UCX's own log, in a file in memory: only there it says which transports it picked.

    Its warnings and errors are passed on to Python's logging. Nothing is done where the operator
    has set up UCX's logging.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._offset = 0
        self._lanes: dict[str, str] = {}  # by own agent: the newest connection's

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Point UCX at the file while UCX is loaded, which the first agent does.

        Not longer: a child process that inherits the variables would open a file of its parent.
        """
        own = {"UCX_LOG_LEVEL", "UCX_LOG_FILE"}
        if self._fd is not None or not hasattr(os, "memfd_create") or own & os.environ.keys():
            yield
            return
        self._fd = os.memfd_create("ucx-log")
        os.environ["UCX_LOG_LEVEL"] = "info"
        os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"
        try:
            yield
        finally:
            for name in own:
                del os.environ[name]

    def lanes(self, agent: str) -> str | None:
        """UCX's transports on the newest connection of our `agent`, best first; None unknown."""
        with self._lock:
            self._read()
            # UCX cuts long names short.
            found = [lanes for own, lanes in self._lanes.items() if agent.startswith(own)]
            return found[-1] if found else None

    def _read(self) -> None:
        if self._fd is None:
            return
        ctypes.CDLL(None).fflush(None)  # UCX's stream is buffered by the block
        while text := os.pread(self._fd, 1 << 20, self._offset):
            lines, newline, _ = text.rpartition(b"\n")
            if not newline:
                return
            self._offset += len(lines) + 1
            for line in lines.splitlines():
                if connected := _CONNECTED.search(line):
                    own, lanes = connected[1].decode(), _bulk_lanes(connected[2].decode())
                    self._lanes[own] = lanes
                elif problem := _PROBLEM.search(line):
                    logger.warning("%s", problem[0].decode(errors="replace"))


def _bulk_lanes(config: str) -> str:
    """`rma_am(tcp/lo) am(tcp/lo cma/memory)` -> `cma+tcp`."""
    devices = re.findall(r"([a-z]\w*)/", config)
    best = [lane for lane in _LANES if any(device.startswith(lane) for device in devices)]
    if any(device == "tcp" for device in devices):
        best.append("tcp")
    return "+".join(best) or config


def warn_if_slow(lanes: str) -> None:
    """Log when a GPU's KV moves by neither NVLink nor RDMA: UCX falls back silently."""
    if not set(lanes.split("+")) & _FAST_FOR_GPUS:
        logger.warning(
            "KV moves between GPU pools by %s, neither NVLink (cuda_ipc) nor RDMA: look at "
            "UCX_TLS, UCX_NET_DEVICES, and whether both processes see each other's GPUs",
            lanes,
        )


ucx_log = UcxLog()

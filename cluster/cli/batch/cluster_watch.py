"""Ends `splitscribe batch` with words of its own when its Ray cluster has ended.

Ray waits a minute for a cluster that does not answer, tells of it in lines of its own, and then
ends the process. What is done has its sidecar by then, so there is nothing to wait for.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from cluster.serve.ray_internals import kill_own_ray, raylet_socket

LOOK_S = 0.5  # between two looks
ANSWER_S = 2.0  # for a connection
# The cluster's head may be away for a while and come back; with its part on this machine gone too,
# it does not.
GONE_S, AWAY_S = 1.0, 30.0
DYING_S = 5.0  # in which a cluster that begins to end is gone
ENDED = 1  # exit status, as after other errors


class ClusterWatch:
    """Looks after a Ray cluster; a context manager.

    tell: called when it has ended, by any thread. leave: called right after it.
    head: host and port of its head. raylet: path of the socket of its part on this machine.
    """

    def __init__(
        self,
        tell: Callable[[], None],
        head: tuple[str, int],
        raylet: str,
        leave: Callable[[], None],
    ) -> None:
        self._tell = tell
        self._head = head
        self._raylet = raylet
        self._leave = leave
        self._left = threading.Event()
        self._looking = threading.Lock()
        self._silent_since_s: float | None = None

    @classmethod
    def of_process(cls, tell: Callable[[], None]) -> Self:
        """Of the cluster that this process is in; the process ends with it."""
        import ray

        host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
        return cls(tell, (host.strip("[]"), int(port)), raylet_socket(), _leave)

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, daemon=True, name="cluster-watch").start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.set()

    def end_if_gone(self) -> None:
        """Look for a while, since something failed that may be its end: else return."""
        until_s = time.monotonic() + DYING_S
        while time.monotonic() < until_s and not self._left.wait(LOOK_S):
            self._look()

    def _watch(self) -> None:
        while not self._left.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._looking:
            if not self._left.is_set() and self._has_ended():
                self._left.set()
                self._tell()
                self._leave()

    def _has_ended(self) -> bool:
        if answers(self._head):
            self._silent_since_s = None
            return False
        now_s = time.monotonic()
        self._silent_since_s = self._silent_since_s or now_s
        limit_s = AWAY_S if answers(self._raylet) else GONE_S
        return now_s - self._silent_since_s >= limit_s


def _leave() -> None:
    """End the process at once: what Ray does at the end of one waits for the cluster."""
    kill_own_ray()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ENDED)


def answers(address: tuple[str, int] | str) -> bool:
    """Whether somebody takes a connection at a host's port, or at a path."""
    try:
        if isinstance(address, str):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(ANSWER_S)
                connection.connect(address)
        else:
            socket.create_connection(address, ANSWER_S).close()
    except OSError:
        return False
    return True

"""A process ends soon after its Ray cluster, and not because the head was away."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator

import pytest

from cluster.serve.start.readiness import LOOK_S, answers, has_ended

PATIENCE_S = 30.0


class Cluster:
    """A socket in place of a head, a process in place of a raylet, and a thread that watches."""

    def __init__(self) -> None:
        self.head = socket.create_server(("127.0.0.1", 0))
        self.raylet = subprocess.Popen(["sleep", "600"])
        self.ended, self.over = threading.Event(), threading.Event()
        self.watch = threading.Thread(target=self._watch, daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        host, port = self.head.getsockname()
        if has_ended(f"{host}:{port}", os.pidfd_open(self.raylet.pid), self.over):
            self.ended.set()

    def close(self) -> None:
        self.head.close()
        self.raylet.kill()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.over.set()
    made.close()
    made.raylet.wait()


def test_the_end_of_a_cluster_is_told(cluster: Cluster) -> None:
    assert not cluster.ended.wait(3 * LOOK_S)
    cluster.raylet.kill()  # a head alone is no cluster
    assert cluster.ended.wait(PATIENCE_S)


def test_a_head_that_is_away_for_a_while_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.head.close()
    assert not cluster.ended.wait(5 * LOOK_S)
    monkeypatch.setattr("cluster.serve.start.readiness.AWAY_S", 1.0)
    assert cluster.ended.wait(PATIENCE_S)


def test_nobody_is_told_once_the_run_is_over(cluster: Cluster) -> None:
    cluster.over.set()
    cluster.close()
    cluster.watch.join(PATIENCE_S)
    assert not cluster.watch.is_alive()
    assert not cluster.ended.is_set()


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:999999", "host..x:6379"])
def test_where_no_cluster_can_be_nothing_answers(address: str) -> None:
    assert not answers(address)

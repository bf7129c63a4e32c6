"""`splitscribe batch` ends soon after its Ray cluster, and not because the head was away."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.batch.run import LOOK_S, has_ended

PATIENCE_S = 30.0


class Cluster:
    """Sockets in place of a head and of its part on this machine, and a thread that watches."""

    def __init__(self, folder: Path) -> None:
        self.head = socket.create_server(("127.0.0.1", 0))
        self.raylet = socket.socket(socket.AF_UNIX)
        self.raylet.bind(str(folder / "raylet"))
        self.raylet.listen()
        self.ended, self.over = threading.Event(), threading.Event()
        host, port = self.head.getsockname()
        addresses = (f"{host}:{port}", self.raylet.getsockname())
        self.watch = threading.Thread(target=self._watch, args=addresses, daemon=True)
        self.watch.start()

    def _watch(self, head: str, raylet: str) -> None:
        if has_ended(head, raylet, self.over):
            self.ended.set()

    def close(self) -> None:
        self.head.close()
        self.raylet.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.over.set()
    made.close()


def test_the_end_of_a_cluster_is_told(cluster: Cluster) -> None:
    assert not cluster.ended.wait(3 * LOOK_S)
    cluster.close()
    assert cluster.ended.wait(PATIENCE_S)


def test_a_head_that_is_away_for_a_while_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.head.close()
    assert not cluster.ended.wait(5 * LOOK_S)
    monkeypatch.setattr("cluster.cli.batch.run.AWAY_S", 1.0)
    assert cluster.ended.wait(PATIENCE_S)


def test_nobody_is_told_once_the_run_is_over(cluster: Cluster) -> None:
    cluster.over.set()
    cluster.close()
    cluster.watch.join(PATIENCE_S)
    assert not cluster.watch.is_alive()
    assert not cluster.ended.is_set()

"""`splitscribe batch` ends soon after its Ray cluster, and not because the head was away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.cli.batch.cluster_watch import LOOK_S, ClusterWatch

PATIENCE_S = 30.0


class Cluster:
    """Sockets in place of a head and of its part on this machine."""

    def __init__(self, folder: Path) -> None:
        self.head = socket.create_server(("127.0.0.1", 0))
        self.address = self.head.getsockname()
        self.path = str(folder / "raylet")
        self.raylet = socket.socket(socket.AF_UNIX)
        self.raylet.bind(self.path)
        self.raylet.listen()
        self.told: list[str] = []
        self.ended = threading.Event()

    def watch(self) -> ClusterWatch:
        def tell() -> None:
            self.told.append("ended")

        return ClusterWatch(tell, self.address, self.path, self.ended.set)

    def close(self) -> None:
        self.head.close()
        self.raylet.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_the_end_of_a_cluster_is_told_once(cluster: Cluster) -> None:
    with cluster.watch() as watch:
        assert not cluster.ended.wait(3 * LOOK_S)
        cluster.close()
        assert cluster.ended.wait(PATIENCE_S)
        watch.end_if_gone()
    assert cluster.told == ["ended"]


def test_a_head_that_is_away_for_a_while_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster.watch():
        cluster.head.close()
        assert not cluster.ended.wait(5 * LOOK_S)
        monkeypatch.setattr("cluster.cli.batch.cluster_watch.AWAY_S", 1.0)
        assert cluster.ended.wait(PATIENCE_S)


def test_nobody_is_told_once_the_run_is_over(cluster: Cluster) -> None:
    with ExitStack() as stack:
        watch = stack.enter_context(cluster.watch())
    cluster.close()
    began = time.monotonic()
    watch.end_if_gone()
    assert time.monotonic() - began < PATIENCE_S
    assert cluster.told == []

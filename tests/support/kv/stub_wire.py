"""A wire without a peer: its reads end when the test says so, and it notes what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.common.kv.handles import sign
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import Descriptor
from cluster.common.messages import CrossKVHandle

LAYOUT = PageLayout("importer", 1, 1, 4, 10, 5, "float32")
KEY = b"key"


class StubWire:
    """Reads end when `done` says so; operations raise `error` when it is set."""

    transport = "stub"
    agent = "stub"
    metadata = b""
    on_notification: Callable[[], object]

    def __init__(self) -> None:
        self.done = True
        self.error: Exception | None = None
        self.n_reads = 0
        self.sent: list[bytes] = []
        self.connected: list[str] = []
        self.disconnected: list[str] = []

    def _operate(self) -> object:
        if self.error is not None:
            raise self.error
        return object()

    def open(self, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        self.landing = counters

    def drain(self) -> Sequence[bytes]:
        return ()

    def connect(self, agent: str, metadata: bytes) -> None:
        self.connected.append(agent)

    def disconnect(self, agent: str) -> None:
        self.disconnected.append(agent)

    def read_pages(self, agent: str, descs: Sequence[Descriptor]) -> object:
        self.n_reads += 1
        return self._operate()

    def read_counter(self, agent: str, local: int, remote: int, notification: bytes) -> object:
        self.n_reads += 1
        self.landing[:] = 7
        return self._operate()

    def poll(self, read: object) -> bool:
        self._operate()
        return self.done

    def notify(self, agent: str, payload: bytes) -> None:
        self.sent.append(payload)

    def close(self) -> None:
        pass


def make_handle(lease: int = 1, agent: str = "encoder-0") -> CrossKVHandle:
    addresses = (0, LAYOUT.page_bytes)
    unsigned = CrossKVHandle(
        "r", 0, 0, agent, b"", LAYOUT.hash, addresses, LAYOUT.page_bytes, 10, 0, 7,
        f"{lease:032x}", 10.0,
    )  # fmt: skip
    return sign(unsigned, KEY)

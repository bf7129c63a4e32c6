"""The transport within one process: the same protocol and semantics, by a copy.

For unit tests, offline transcription and platforms without NIXL. Exporters are found by name in a
table of this process. `MemoryExporter.freeze` and `kill` act as if the exporter's process had been
stopped or killed, so that everything written against NIXL's failures can be tried without it.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import HandleRefusedError, PeerLostError
from cluster.kv.exporter import Exporter
from cluster.kv.importer import Importer
from cluster.kv.layout import PageLayout
from cluster.kv.leases import COUNTER_BYTES, GenerationCounters
from cluster.kv.pool import PagePool
from cluster.kv.transfer import LEASE_S, RENEW_S
from cluster.kv.wire import Span

TRANSPORT = "memory"


class _MemoryInbox:
    """What stands for an exporter's process: its memory, its notifications, its being alive."""

    transport = TRANSPORT
    metadata = b""

    def __init__(self, name: str) -> None:
        self.agent = f"{name}-memory-{secrets.token_hex(4)}"
        self.alive = True
        self.running = threading.Event()
        self.running.set()
        self.pool: PagePool | None = None
        self._counters: GenerationCounters | None = None
        self.deliver: Callable[[Iterable[bytes]], None] | None = None  # set by the exporter
        self._notifications: list[bytes] = []  # that came while frozen
        self._lock = threading.Lock()

    def open(self, pool: PagePool, counters: GenerationCounters) -> None:
        self.pool = pool
        self._counters = counters
        with _inboxes_lock:
            _inboxes[self.agent] = self

    def put(self, payload: bytes) -> None:
        if self.deliver is not None and self.running.is_set():
            self.deliver([payload])
            return
        with self._lock:
            self._notifications.append(payload)

    def drain(self) -> Iterable[bytes]:
        if not self.running.is_set():
            return ()
        with self._lock:
            taken, self._notifications = self._notifications, []
            return taken

    def counter_at(self, address: int) -> int:
        assert self._counters is not None
        index, rest = divmod(address - self._counters.address(0), COUNTER_BYTES)
        if rest or not 0 <= index < len(self._counters.array):
            raise HandleRefusedError(f"no counter of {self.agent} is at {address:#x}")
        return self._counters.value(index)

    def close(self) -> None:
        self.alive = False
        with _inboxes_lock:
            _inboxes.pop(self.agent, None)


# Exporters of this process by agent name: the one thing that both ends of a same-process
# transport must share without a word passing between them.
_inboxes: WeakValueDictionary[str, _MemoryInbox] = WeakValueDictionary()
_inboxes_lock = threading.Lock()


@dataclass(eq=False, slots=True)
class _Copy:
    """A read: of pages when `payload` is there, else of one counter."""

    inbox: _MemoryInbox
    payload: Sequence[Span] = ()
    local: int = 0
    remote: int = 0
    notification: bytes = b""


class _MemoryWire:
    """Reads are copies, made when they are polled while the exporter is not frozen."""

    transport = TRANSPORT

    def __init__(self) -> None:
        self._peers: dict[str, _MemoryInbox] = {}
        self._pool: PagePool | None = None

    def open(self, pool: PagePool, landing: NDArray[np.uint64]) -> None:
        self._pool = pool

    def connect(self, agent: str, metadata: bytes) -> None:
        with _inboxes_lock:
            inbox = _inboxes.get(agent)
        if inbox is None:
            raise PeerLostError(f"no exporter {agent} in this process")
        self._peers[agent] = inbox

    def disconnect(self, agent: str) -> None:
        self._peers.pop(agent, None)

    def read_pages(self, agent: str, payload: Sequence[Span]) -> object:
        return _Copy(self._alive(agent), payload=payload)

    def read_counter(self, agent: str, local: int, remote: int, notification: bytes) -> object:
        return _Copy(self._alive(agent), local=local, remote=remote, notification=notification)

    def poll(self, read: object) -> bool:
        assert isinstance(read, _Copy)
        inbox = read.inbox
        if not inbox.alive:
            raise PeerLostError(f"exporter {inbox.agent} is gone")
        if not inbox.running.is_set():
            return False
        if read.payload:
            for span in read.payload:
                self._copy_pages(inbox, span)
        else:
            value = ctypes.c_uint64(inbox.counter_at(read.remote))
            ctypes.memmove(read.local, ctypes.addressof(value), COUNTER_BYTES)
        if read.notification:
            inbox.put(read.notification)
        return True

    def notify(self, agent: str, payload: bytes) -> None:
        self._alive(agent).put(payload)

    def close(self) -> None:
        self._peers.clear()

    def _alive(self, agent: str) -> _MemoryInbox:
        inbox = self._peers.get(agent)
        if inbox is None or not inbox.alive:
            raise PeerLostError(f"exporter {agent} is gone")
        return inbox

    def _copy_pages(self, inbox: _MemoryInbox, span: Span) -> None:
        assert self._pool is not None
        assert inbox.pool is not None
        n_pages = span.n_bytes // self._pool.page_bytes
        here = self._pool.page_at(span.local)
        try:
            there = inbox.pool.page_at(span.remote)
        except ValueError as error:
            raise HandleRefusedError(f"exporter {inbox.agent}: {error}") from error
        source = inbox.pool.tensor[there : there + n_pages]
        self._pool.tensor[here : here + n_pages].copy_(source)
        if self._pool.device.type == "cuda":
            torch.cuda.current_stream(self._pool.device).synchronize()


class MemoryExporter(Exporter):
    """A KVExporter for importers in the same process."""

    def __init__(
        self,
        layout: PageLayout,
        n_pages: int,
        *,
        cluster_key: bytes,
        name: str = "encoder",
        device: str = "cpu",
        lease_s: float = LEASE_S,
    ) -> None:
        self._memory = _MemoryInbox(name)
        super().__init__(
            layout, n_pages, self._memory, cluster_key=cluster_key, device=device, lease_s=lease_s
        )
        self._memory.deliver = self.handle_notifications

    def freeze(self) -> None:
        """Answer nothing from now on, as a process after SIGSTOP; for tests."""
        self._memory.running.clear()

    def thaw(self) -> None:
        """Go on after `freeze`."""
        self._memory.running.set()

    def kill(self) -> None:
        """Be gone at once, as a process after SIGKILL; for tests."""
        self._memory.close()


class MemoryImporter(Importer):
    """A KVImporter for exporters in the same process."""

    def __init__(
        self,
        layout: PageLayout,
        n_pages: int,
        *,
        cluster_key: bytes,
        name: str = "decoder",
        device: str = "cpu",
        fetch_timeout_s: float = 10.0,
        renew_s: float = RENEW_S,
    ) -> None:
        super().__init__(
            layout,
            n_pages,
            _MemoryWire(),
            cluster_key=cluster_key,
            device=device,
            fetch_timeout_s=fetch_timeout_s,
            renew_s=renew_s,
        )

"""KV by NIXL: one-sided READ over InfiniBand, RoCE, NVLink, shared memory or TCP.

One agent per replica, used by one thread: the exporter's or the importer's. The pool is one
registered region, the counters another, in host memory. What NIXL raises becomes PeerLostError or
HandleRefusedError here. A GPU pool is registered as "VRAM" with its device's index, and that device
is made current on the agent's thread; that path has not been run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.errors import HandleRefusedError, PeerLostError
from cluster.kv.exporter import Exporter
from cluster.kv.gpu_memory import check_allocator
from cluster.kv.importer import Importer
from cluster.kv.layout import PageLayout
from cluster.kv.leases import COUNTER_BYTES, GenerationCounters
from cluster.kv.nixl_agent import make_agent, ucx_log, unique_name, warn_if_slow
from cluster.kv.pool import PagePool
from cluster.kv.transfer import LEASE_S, RENEW_S
from cluster.kv.wire import Span

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_REFUSALS = ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a pool lies. It travels in front of NIXL's metadata, since a READ must name it."""

    memory: str  # "DRAM" or "VRAM"
    device_id: int

    def prefix(self, metadata: bytes) -> bytes:
        return f"{self.memory}:{self.device_id}\n".encode() + metadata

    @classmethod
    def split(cls, prefixed: bytes) -> tuple[_Place, bytes]:
        """The place and NIXL's metadata; ValueError when there is no place in front."""
        head, newline, metadata = prefixed.partition(b"\n")
        memory, _, device_id = head.decode().partition(":")
        if not newline or memory not in ("DRAM", "VRAM"):
            raise ValueError("connection data without a place")
        return cls(memory, int(device_id)), metadata


_HOST = _Place("DRAM", 0)


class _Registration:
    """An agent with a pool and an array of counters registered; made and used on one thread."""

    def __init__(self, name: str, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        self.place = _HOST
        if pool.device.type == "cuda":
            index = pool.tensor.device.index
            torch.cuda.set_device(index)  # UCX looks at the calling thread's context
            self.place = _Place("VRAM", index)
        self.agent: Any = make_agent(name)
        region = (pool.base_address, pool.n_bytes, self.place.device_id, "")
        self._regions = [
            self.agent.register_memory([region], self.place.memory),
            self.agent.register_memory([(counters.ctypes.data, counters.nbytes, 0, "")], "DRAM"),
        ]
        # Pool and counters must outlive the registration.
        self._owners = (pool, counters)

    def close(self) -> None:
        for region in self._regions:
            self.agent.deregister_memory(region)
        self._regions.clear()
        self.agent = None  # the last reference: stops its progress thread, ends what it does


class _NixlInbox:
    transport = "nixl"

    def __init__(self, name: str) -> None:
        self.agent = unique_name(name)
        self.metadata = b""
        self._registration: _Registration | None = None

    def open(self, pool: PagePool, counters: GenerationCounters) -> None:
        self._registration = _Registration(self.agent, pool, counters.array)
        metadata = self._registration.agent.get_agent_metadata()
        self.metadata = self._registration.place.prefix(metadata)

    def drain(self) -> Iterable[bytes]:
        assert self._registration is not None
        by_sender: dict[str, list[bytes]] = self._registration.agent.get_new_notifs()
        return [payload for payloads in by_sender.values() for payload in payloads]

    def close(self) -> None:
        if self._registration is not None:
            self._registration.close()
            self._registration = None


@dataclass(eq=False, slots=True)
class _Transfer:
    """A posted transfer; `handle` is NIXL's, released when the transfer has ended."""

    handle: Any
    state: str


class _NixlWire:
    def __init__(self, name: str) -> None:
        self._name = unique_name(name)
        self._registration: _Registration | None = None
        self._places: dict[str, _Place] = {}  # of each peer's pool
        self._in_flight: set[_Transfer] = set()
        self.transport = "nixl"
        self._looks_left = 4  # into UCX's log, for what it picked

    def open(self, pool: PagePool, landing: NDArray[np.uint64]) -> None:
        self._registration = _Registration(self._name, pool, landing)

    def connect(self, agent: str, metadata: bytes) -> None:
        try:
            place, metadata = _Place.split(metadata)
        except ValueError as error:
            raise HandleRefusedError(f"the metadata of {agent} is not NIXL's: {error}") from error
        added = _guard(agent, lambda: self._agent.add_remote_agent(metadata))
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != agent:
            self._agent.remove_remote_agent(name)
            raise HandleRefusedError(f"the metadata of {agent} is that of {name}")
        self._places[agent] = place

    def disconnect(self, agent: str) -> None:
        self._places.pop(agent, None)
        self._note_transport()  # and what UCX had to say about it
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            logger.warning("cannot remove agent %s: %s", agent, error)

    def read_pages(self, agent: str, payload: Sequence[Span]) -> object:
        assert self._registration is not None
        local = [(span.local, span.n_bytes) for span in payload]
        remote = [(span.remote, span.n_bytes) for span in payload]
        here = self._descs(local, self._registration.place)
        return self._post(agent, here, self._descs(remote, self._places[agent]), b"")

    def read_counter(self, agent: str, local: int, remote: int, notification: bytes) -> object:
        here = self._descs([(local, COUNTER_BYTES)], _HOST)
        there = self._descs([(remote, COUNTER_BYTES)], _HOST)
        return self._post(agent, here, there, notification)

    def poll(self, read: object) -> bool:
        assert isinstance(read, _Transfer)
        try:
            if read.state == "PROC":
                read.state = _guard("the peer", lambda: self._agent.check_xfer_state(read.handle))
            if read.state == "PROC":
                return False
            if read.state != "DONE":
                raise PeerLostError(f"the transfer ended as {read.state}")
        except Exception:
            self._release(read)
            raise
        self._release(read)
        if self.transport == "nixl" and self._looks_left > 0:
            self._looks_left -= 1
            self._note_transport()
        return True

    def notify(self, agent: str, payload: bytes) -> None:
        _guard(agent, lambda: self._agent.send_notif(agent, payload))

    def close(self) -> None:
        for transfer in tuple(self._in_flight):
            self._release(transfer)
        if self._registration is not None:
            self._registration.close()
            self._registration = None

    @property
    def _agent(self) -> Any:
        assert self._registration is not None
        return self._registration.agent

    def _descs(self, regions: list[tuple[int, int]], place: _Place) -> Any:
        rows = [(address, n_bytes, place.device_id) for address, n_bytes in regions]
        return self._agent.get_xfer_descs(np.array(rows, dtype=np.uint64), place.memory)

    def _post(self, agent: str, local: Any, remote: Any, notification: bytes) -> _Transfer:
        nixl = self._agent
        handle = _guard(
            agent, lambda: nixl.initialize_xfer("READ", local, remote, agent, notification)
        )
        transfer = _Transfer(handle, "PROC")
        self._in_flight.add(transfer)
        try:
            transfer.state = _guard(agent, lambda: nixl.transfer(handle))
        except Exception:
            self._release(transfer)
            raise
        return transfer

    def _release(self, transfer: _Transfer) -> None:
        self._in_flight.discard(transfer)
        try:
            transfer.handle.release()
        except Exception as error:
            logger.warning("cannot release a transfer handle: %s", error)

    def _note_transport(self) -> None:
        if lanes := ucx_log.lanes(self._name):
            name = f"nixl/{lanes}"
            if name != self.transport:
                logger.info("UCX moves KV by %s", lanes)
                self.transport = name
                if self._registration and self._registration.place.memory == "VRAM":
                    warn_if_slow(lanes)


class NixlExporter(Exporter):
    """A KVExporter for importers anywhere that UCX reaches."""

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
        if device != "cpu":
            check_allocator()
        super().__init__(
            layout,
            n_pages,
            _NixlInbox(name),
            cluster_key=cluster_key,
            device=device,
            lease_s=lease_s,
        )


class NixlImporter(Importer):
    """A KVImporter for exporters anywhere that UCX reaches."""

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
        if device != "cpu":
            check_allocator()
        super().__init__(
            layout,
            n_pages,
            _NixlWire(name),
            cluster_key=cluster_key,
            device=device,
            fetch_timeout_s=fetch_timeout_s,
            renew_s=renew_s,
        )


def _guard(peer: str, operation: Callable[[], _T]) -> _T:
    """Run a call of NIXL; what it raises becomes one of our errors."""
    try:
        return operation()
    except Exception as error:
        if type(error).__name__ in _REFUSALS:
            raise HandleRefusedError(f"{peer} has no such memory: {error}") from error
        raise PeerLostError(f"lost {peer}: {error}") from error

"""KV by NIXL: one-sided READ over InfiniBand, RoCE, NVLink, shared memory or TCP.

The pool is one registered region, the counters are another, in host memory. What NIXL raises
becomes PeerLostError or HandleRefusedError here. A pool on a GPU is registered as "VRAM" with its
device's index, and that device is made current on the thread that opens the wire; that path has
not been run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.common.errors import HandleRefusedError, PeerLostError
from cluster.common.kv.pool import PagePool
from cluster.common.kv.transfer_config import TransferConfig
from cluster.common.kv.wires.gpu_memory import check_allocator
from cluster.common.kv.wires.nixl_agent import make_agent, ucx_log, warn_if_slow
from cluster.common.kv.wires.wire import COUNTER_BYTES, Descriptor

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_REFUSALS = ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError")


@dataclass(frozen=True, slots=True)
class _PoolMemory:
    """The memory of a pool, which a READ must name: it travels in front of NIXL's metadata."""

    memory: str  # "DRAM" or "VRAM"
    device_id: int

    def prefix(self, metadata: bytes) -> bytes:
        return f"{self.memory}:{self.device_id}\n".encode() + metadata

    @classmethod
    def split(cls, prefixed: bytes) -> tuple[_PoolMemory, bytes]:
        """The memory and NIXL's metadata; ValueError when no memory is named in front."""
        head, newline, metadata = prefixed.partition(b"\n")
        memory, _, device_id = head.decode().partition(":")
        if not newline or memory not in ("DRAM", "VRAM"):
            raise ValueError("connection data that names no memory")
        return cls(memory, int(device_id)), metadata


_HOST = _PoolMemory("DRAM", 0)


@dataclass(eq=False, slots=True)
class _Transfer:
    """A posted transfer; `handle` is NIXL's, released when the transfer has ended."""

    handle: Any
    state: str


class NixlWire:
    def __init__(self, config: TransferConfig) -> None:
        if config.device != "cpu":
            check_allocator()
        self.transport = "nixl"
        self.agent = config.new_agent_name()
        self.metadata = b""
        self.on_notification: Callable[[], object] = lambda: None  # never called: NIXL is polled
        self._pool_memory = _HOST
        self._agent: Any = None  # NIXL's, made by `open`
        self._registered: list[Any] = []
        self._peer_memories: dict[str, _PoolMemory] = {}  # of each peer's pool
        self._in_flight: set[_Transfer] = set()
        self._looks_left = 4  # into UCX's log, for what it picked

    def open(self, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        if pool.device.type == "cuda":
            index = pool.tensor.device.index
            torch.cuda.set_device(index)  # UCX looks at the calling thread's context
            self._pool_memory = _PoolMemory("VRAM", index)
        self._registered_memory = (pool, counters)  # must live as long as they are registered
        self._agent = make_agent(self.agent)
        region = (pool.base_address, pool.n_bytes, self._pool_memory.device_id, "")
        self._registered = [
            self._agent.register_memory([region], self._pool_memory.memory),
            self._agent.register_memory([(counters.ctypes.data, counters.nbytes, 0, "")], "DRAM"),
        ]
        self.metadata = self._pool_memory.prefix(self._agent.get_agent_metadata())

    def drain(self) -> Sequence[bytes]:
        by_sender: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [payload for payloads in by_sender.values() for payload in payloads]

    def connect(self, agent: str, metadata: bytes) -> None:
        try:
            memory, metadata = _PoolMemory.split(metadata)
        except ValueError as error:
            raise HandleRefusedError(f"the metadata of {agent} is not NIXL's: {error}") from error
        added = _guard(agent, lambda: self._agent.add_remote_agent(metadata))
        name = added.decode() if isinstance(added, bytes) else str(added)
        if name != agent:
            self._agent.remove_remote_agent(name)
            raise HandleRefusedError(f"the metadata of {agent} is that of {name}")
        self._peer_memories[agent] = memory

    def disconnect(self, agent: str) -> None:
        self._peer_memories.pop(agent, None)
        self._note_transport()  # and what UCX had to say about it
        try:
            self._agent.remove_remote_agent(agent)
        except Exception as error:
            logger.warning("cannot remove agent %s: %s", agent, error)

    def read_pages(self, agent: str, descs: Sequence[Descriptor]) -> object:
        here = self._descs([(desc.local, desc.n_bytes) for desc in descs], self._pool_memory)
        remote = [(desc.remote, desc.n_bytes) for desc in descs]
        return self._post(agent, here, self._descs(remote, self._peer_memories[agent]), b"")

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
        for region in self._registered:
            self._agent.deregister_memory(region)
        self._registered.clear()
        self._agent = None  # the last reference: stops its progress thread, ends what it does

    def _descs(self, regions: list[tuple[int, int]], memory: _PoolMemory) -> Any:
        rows = [(address, n_bytes, memory.device_id) for address, n_bytes in regions]
        return self._agent.get_xfer_descs(np.array(rows, dtype=np.uint64), memory.memory)

    def _post(self, agent: str, local: Any, remote: Any, notification: bytes) -> _Transfer:
        handle = _guard(
            agent, lambda: self._agent.initialize_xfer("READ", local, remote, agent, notification)
        )
        transfer = _Transfer(handle, "PROC")
        self._in_flight.add(transfer)
        try:
            transfer.state = _guard(agent, lambda: self._agent.transfer(handle))
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
        if lanes := ucx_log.lanes(self.agent):
            name = f"nixl/{lanes}"
            if name != self.transport:
                logger.info("UCX moves KV by %s", lanes)
                self.transport = name
                if self._pool_memory.memory == "VRAM":
                    warn_if_slow(lanes)


def _guard(peer: str, operation: Callable[[], _T]) -> _T:
    """Run a call of NIXL; what it raises becomes one of our errors."""
    try:
        return operation()
    except Exception as error:
        if type(error).__name__ in _REFUSALS:
            raise HandleRefusedError(f"{peer} has no such memory: {error}") from error
        raise PeerLostError(f"lost {peer}: {error}") from error

"""KV by NIXL: one-sided READ over InfiniBand, RoCE, NVLink, shared memory or TCP.

The pool is one registered region, the counters in host memory are another. UCX and NIXL read the
environment when they are loaded, so it is set before the import. NIXL's Python API hard-codes a
progress delay of 0, which spins a core per agent, so agents get a configuration that keeps ours;
without a progress thread on both sides they do not connect.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.common.errors import ConfigurationError, HandleRefusedError, PeerLostError
from cluster.common.kv.wire import COUNTER_BYTES, Descriptor, TransferConfig

if TYPE_CHECKING:
    from cluster.common.kv.pool import PagePool

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_REFUSALS = ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError")

PROGRESS_DELAY_US = 200_000  # the thread is event-driven: this bounds its idle wake-ups, no more
PACKAGES = ("nixl_cu13", "nixl", "nixl_cu12")

_ENVIRONMENT = {
    "UCX_TCP_USER_TIMEOUT": "5s",  # a partition shows in 5 to 10 s, by default in minutes
    "UCX_TCP_TX_SEG_SIZE": "256k",  # twice the bandwidth of the default
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_CMA_SEG_SIZE": "16m",  # the default, 512k, takes four times as long on 245 MB
    "NIXL_LOG_LEVEL": "ERROR",
}
# Without NVLink, so also on a single GPU, UCX does not read GPU memory by cuda_ipc by default, but
# copies it by 256 KB through the host and a socket.
_READS_ON_A_GPU = ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
_FAST_FOR_GPUS = ("cuda_ipc", "rc", "dc", "srd")  # prefixes of their names
# UCX logs a table of the transports for each peer and memory: its title, and its row of the longest
# reads.
_READER = re.compile(rb"\| (\S+) int(?:ra|er)-node cfg#")
_INTO = re.compile(rb"by ucp_get\S* into (\w+)")
_LONGEST = re.compile(rb"\.\.inf +\| ([^|]+) \| ([^|]+) \|")
_PROBLEM = re.compile(rb"UCX\s+(?:WARN|ERROR)\s.*")

_load_lock = threading.Lock()


def load_api() -> ModuleType:
    """Import NIXL's Python API. Raises ConfigurationError where no package loads."""
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
    """Keep NIXL, while it is imported, from configuring Python's logging.

    It would close all handlers of the process: log files of replicas would end, and a restarted
    Serve controller, which asks for that file, would replace the replica.
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
    """UCX's own log, in a file in memory: only there it says by which transports it reads.

    A connection may have more transports, not all of which can read the memory in question.
    Warnings and errors are passed on to Python's logging. Does nothing where the operator
    configured UCX's log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._offset = 0
        self._reader = self._into = ""  # of the table that is being read
        self._lanes: dict[tuple[str, str], str] = {}  # the newest, by own agent and memory

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Point UCX, which the first agent loads, at the file while an agent is made.

        Not longer: a child process would inherit the variables and open a file of its parent.
        """
        own = {"UCX_LOG_LEVEL", "UCX_LOG_FILE", "UCX_PROTO_INFO"}
        if not hasattr(os, "memfd_create") or own & os.environ.keys():
            yield
            return
        if self._fd is None:
            self._fd = os.memfd_create("ucx-log")
        os.environ["UCX_LOG_LEVEL"] = "info"
        os.environ["UCX_LOG_FILE"] = f"/proc/{os.getpid()}/fd/{self._fd}"
        os.environ["UCX_PROTO_INFO"] = "*ucp_get*"
        try:
            yield
        finally:
            for name in own:
                del os.environ[name]

    def lanes(self, agent: str, memory: str) -> str | None:
        """Transports of our `agent`'s long reads into "host" or "cuda" memory; None before one."""
        with self._lock:
            self._read()
            # UCX truncates long names.
            ours = (key for key in self._lanes if agent.startswith(key[0]) and key[1] == memory)
            key = next(ours, None)
            return key and self._lanes[key]

    def _read(self) -> None:
        if self._fd is None:
            return
        ctypes.CDLL(None).fflush(None)  # UCX's stream is block-buffered
        while text := os.pread(self._fd, 1 << 20, self._offset):
            lines, newline, _ = text.rpartition(b"\n")
            if not newline:
                return
            self._offset += len(lines) + 1
            for line in lines.splitlines():
                self._take(line)

    def _take(self, line: bytes) -> None:
        if found := _READER.search(line):
            self._reader = found[1].decode()
        elif found := _INTO.search(line):
            self._into = found[1].decode()
        elif found := _LONGEST.search(line):
            # "zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1"
            lanes = re.findall(r"([a-z]\w*)/", found[2].decode())
            if b"emulation" in found[1] and self._into != "host":
                lanes.insert(0, "host")  # copied through host memory
            self._lanes[self._reader, self._into] = "+".join(dict.fromkeys(lanes))
        elif found := _PROBLEM.search(line):
            logger.warning("%s", found[0].decode(errors="replace"))


def warn_if_slow(lanes: str) -> None:
    """Warn if a GPU's KV moves by neither NVLink nor RDMA: UCX falls back silently."""
    if not lanes.startswith(_FAST_FOR_GPUS):
        logger.warning(
            "KV moves between GPU pools by %s, neither NVLink (cuda_ipc) nor RDMA: look at "
            "UCX_TLS, UCX_NET_DEVICES, and whether both processes see each other's GPUs; or set "
            "handoff to encoder_states, which are far fewer bytes",
            lanes,
        )


ucx_log = UcxLog()


_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_UNREADABLE = {  # modes whose memory other processes cannot map
    re.compile(r"expandable_segments\s*:\s*(true|1)", re.I): "expandable_segments:True",
    re.compile(r"backend\s*:\s*cudaMallocAsync", re.I): "backend:cudaMallocAsync",
}


def check_allocator(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigurationError if torch's allocator makes memory that cannot be registered."""
    for variable in _VARIABLES:
        for pattern, mode in _UNREADABLE.items():
            if pattern.search(environ.get(variable, "")):
                raise ConfigurationError(
                    f"{variable} asks for {mode}, whose memory moves or cannot be mapped by other "
                    f"processes: KV pools on a GPU are registered once, so take it out"
                )


@dataclass(frozen=True, slots=True)
class _PoolMemory:
    """A pool's kind of memory, sent in front of NIXL's metadata since a READ must name it."""

    memory: str  # "DRAM" or "VRAM"
    device_id: int

    def prefix(self, metadata: bytes) -> bytes:
        return f"{self.memory}:{self.device_id}\n".encode() + metadata

    @classmethod
    def split(cls, prefixed: bytes) -> tuple[_PoolMemory, bytes]:
        """Raises ValueError if no memory is named in front."""
        head, newline, metadata = prefixed.partition(b"\n")
        memory, _, device_id = head.decode().partition(":")
        if not newline or memory not in ("DRAM", "VRAM"):
            raise ValueError("connection data that names no memory")
        return cls(memory, int(device_id)), metadata


_HOST = _PoolMemory("DRAM", 0)


@dataclass(eq=False, slots=True)
class _Transfer:
    handle: Any  # NIXL's; released when the transfer has ended
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

    def open(self, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        if pool.device.type == "cuda":
            index = pool.tensor.device.index
            import torch

            torch.cuda.set_device(index)  # UCX looks at the calling thread's context
            self._pool_memory = _PoolMemory("VRAM", index)
            os.environ.setdefault(*_READS_ON_A_GPU)  # on a CPU UCX warns of it
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
        self._note_transport()  # also logs UCX's warnings
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
        if self.transport == "nixl":
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
        self._agent = None  # the last reference: this ends its thread and transfers

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
        on_gpu = self._pool_memory.memory == "VRAM"
        if lanes := ucx_log.lanes(self.agent, "cuda" if on_gpu else "host"):
            name = f"nixl/{lanes}"
            if name != self.transport:
                logger.info("UCX moves KV by %s", lanes)
                self.transport = name
                if on_gpu:
                    warn_if_slow(lanes)


def _guard(peer: str, operation: Callable[[], _T]) -> _T:
    try:
        return operation()
    except Exception as error:
        if type(error).__name__ in _REFUSALS:
            raise HandleRefusedError(f"{peer} has no such memory: {error}") from error
        raise PeerLostError(f"lost {peer}: {error}") from error

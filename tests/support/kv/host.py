"""Exporters and readers for the KV contract tests, in this process or in one of their own.

Run as a script it serves calls of such a service over the connection whose descriptor it gets.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.common.kv.connect import make_wire
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout, window_bytes
from cluster.common.kv.wire import TransferConfig
from cluster.common.messages import CrossKVHandle
from tests.support.kv.ends import StoppableWire

KEY = b"the cluster's key"
LAYOUTS: dict[str, PageLayout] = {
    "cross_kv": PageLayout("contract", 2, 2, 16, 1500, 125, "float32"),  # 12 pages of 64 kB
    "encoder_states": PageLayout.of_states("contract", 64, 1500, "float32"),  # one of 384 kB
    "cross_kv whole": PageLayout("contract", 2, 2, 16, 1500, 1500, "float32"),  # one of 768 kB
}
# Where sockets differ most: what is in flight when a process stops or dies.
over_sockets_too = pytest.mark.parametrize(
    "mode",
    [
        "memory",
        "memory-states",
        "nixl",
        "nixl-tcp",
        pytest.param("nixl-states", marks=pytest.mark.slow),
        pytest.param("nixl-cuda", marks=pytest.mark.gpu),
    ],
    indirect=True,
)
REPLY_TIMEOUT_S = 60.0
DEADLINE_S = 30.0

MakeHost = Callable[..., Any]


def kv_of(seed: int, layout: PageLayout) -> torch.Tensor:
    """What the encoder of `seed` would make of a window: [pages, *page_shape]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((layout.pages_per_window, *layout.page_shape), generator=generator)


def device() -> str:
    return os.environ.get("CONTRACT_DEVICE", "cpu")


def pages_of(importer: Any, pages: Any) -> torch.Tensor:
    found: torch.Tensor = importer.pool.tensor[list(pages)].cpu()
    return found.clone()


def allocate(importer: Any, n_windows: int = 1) -> Any:
    return importer.pool.allocate(n_windows * importer.layout.pages_per_window)


def take(importer: Any, handle: CrossKVHandle) -> torch.Tensor:
    importer.accept(handle)
    pages = allocate(importer)
    try:
        stats = importer.fetch(handle, pages).result(DEADLINE_S)
        assert stats.n_bytes == window_bytes(importer.layout)
        copied = pages_of(importer, pages)
    except BaseException:
        with suppress(RuntimeError):  # after a timeout they are in quarantine
            importer.pool.release(pages)
        raise
    importer.pool.release(pages)
    return copied


def make_importer(
    transport: str, layout: PageLayout, n_windows: int, cluster_key: bytes = KEY, **options: Any
) -> KVImporter:
    config = TransferConfig(cluster_key, "decoder", transport, device(), **options)  # type: ignore[arg-type]
    return KVImporter(layout, n_windows * layout.pages_per_window, config, _wire(config))


def _wire(config: TransferConfig) -> Any:
    return StoppableWire(config) if config.transport == "memory" else make_wire(config)


class ExporterService:
    def __init__(self, transport: str, payload: str, n_windows: int, lease_s: float) -> None:
        self._layout = layout = LAYOUTS[payload]
        self._window = layout.pages_per_window
        config = TransferConfig(KEY, "encoder", transport, device(), lease_s=lease_s)  # type: ignore[arg-type]
        self.wire: Any = _wire(config)
        self.exporter = KVExporter(layout, n_windows * self._window, config, self.wire)

    def publish(self, seed: int, key: bytes = b"", frames: int = 1500) -> CrossKVHandle:
        pages = self.exporter.reserve(self._window, timeout_s=10.0)
        assert pages is not None, f"no pages: {self.exporter.pool!r}"
        n_pages = self._layout.pages_for(frames)
        if surplus := pages[n_pages:]:
            self.exporter.abandon(surplus)
        pages = pages[:n_pages]
        self._write(pages, seed)
        return self.exporter.publish(
            pages, request_id=f"request-{seed}", window=seed, attempt=0, frames=frames, key=key
        )

    def publish_again(self, key: bytes) -> CrossKVHandle | None:
        return self.exporter.publish_again(key, request_id="again", window=0, attempt=0)

    def publish_stale(self, seed: int) -> CrossKVHandle:
        """A handle whose pages went back and were written for another window."""
        handle = self.publish(seed)
        assert self.exporter.revoke(handle.lease)
        pages = self.exporter.reserve(self._window)
        self._write(pages, seed + 1)
        self.exporter.abandon(pages)
        return handle

    def _write(self, pages: Any, seed: int) -> None:
        pool = self.exporter.pool
        pool.tensor[list(pages)] = kv_of(seed, self._layout)[: len(pages)].to(pool.device)
        if pool.device.type == "cuda":
            torch.cuda.synchronize()

    def revoke(self, lease: str) -> bool:
        return bool(self.exporter.revoke(lease))

    def state(self) -> SimpleNamespace:
        exporter = self.exporter
        rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return SimpleNamespace(
            n_windows_free=exporter.n_free_pages / self._window,
            n_leases=exporter.n_leases,
            n_kept=exporter.n_kept,
            n_evicted=exporter.n_evicted,
            n_ignored=exporter.refused()["unknown_lease"],
            n_malformed=exporter.refused()["malformed"],
            rss_bytes=rss_pages * os.sysconf("SC_PAGE_SIZE"),
            n_files=len(os.listdir("/proc/self/fd")),
        )

    def close(self) -> None:
        self.exporter.pool.check_integrity(
            n_used=self.exporter.pool.n_pages - self.exporter.pool.n_free
        )
        self.exporter.close()
        self.exporter.check_integrity()
        self.exporter.pool.check_integrity()

    def check_integrity(self) -> None:
        self.exporter.check_integrity()


class ReaderService:
    def __init__(self, transport: str, payload: str) -> None:
        self.importer = make_importer(transport, LAYOUTS[payload], 4)

    def begin(self, handle: CrossKVHandle) -> None:
        self.importer.accept(handle)
        self.importer.fetch(handle, allocate(self.importer))

    def read(self, handle: CrossKVHandle) -> None:
        self.importer.accept(handle)
        self.importer.fetch(handle, allocate(self.importer)).result(REPLY_TIMEOUT_S)

    def close(self) -> None:
        self.importer.close()


class LocalHost(ExporterService):
    def freeze(self) -> None:
        self.wire.is_frozen = True

    def thaw(self) -> None:
        self.wire.is_frozen = False

    def kill(self) -> None:
        self.wire.close()


class WorkerProcess:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        path = (Path(__file__).parents[3], *filter(None, [os.environ.get("PYTHONPATH")]))
        self._connection = Connection(ours.detach())
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))},
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, signal_number: int) -> None:
        self._process.send_signal(signal_number)

    def call(self, name: str, *args: Any) -> Any:
        self._connection.send((name, args))
        assert self._connection.poll(REPLY_TIMEOUT_S), "the exporter's process does not answer"
        value = self._connection.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def wait(self) -> int:
        return self._process.wait(REPLY_TIMEOUT_S)

    def end(self) -> None:
        self._connection.close()
        assert self.wait() in (0, -signal.SIGKILL)


class ProcessHost:
    def __init__(
        self, process: WorkerProcess, kind: str, environment: dict[str, str], *args: Any
    ) -> None:
        self._process = process
        process.call(kind, environment, *args)

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._process.call(name, *args)

    def freeze(self) -> None:
        self._process.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send(signal.SIGCONT)

    def kill(self) -> None:
        self._process.send(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process.alive:
            self.thaw()
            self._process.call("close")


def serve(connection: Connection) -> None:
    kinds = {"exporter": ExporterService, "reader": ReaderService}
    service: Any = None
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            if name in kinds:
                environment, *args = args
                for variable in ("UCX_TLS", "CONTRACT_DEVICE"):
                    os.environ.pop(variable, None)
                os.environ.update(environment)
                service = kinds[name](*args)
                connection.send(None)
            else:
                connection.send(getattr(service, name)(*args))
        except Exception as error:
            connection.send(error)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))

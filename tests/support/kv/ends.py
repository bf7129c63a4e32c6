"""Exporters and importers over the transport within one process, as tests want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.memory_wire import MemoryWire
from cluster.common.kv.wire import TransferConfig
from tests.support.waiting import wait_until as wait_until


class StoppableWire(MemoryWire):
    """While it is frozen it answers nothing, as a process after SIGSTOP."""

    is_frozen = False

    def drain(self) -> Sequence[bytes]:
        return () if self.is_frozen else super().drain()

    def poll(self, read: Any) -> bool:
        is_stopped = read.peer._is_open and getattr(read.peer, "is_frozen", False)
        return False if is_stopped else super().poll(read)


class MemoryExporter(KVExporter):
    def __init__(
        self, layout: PageLayout, n_pages: int, *, cluster_key: bytes, **options: Any
    ) -> None:
        config = TransferConfig(cluster_key, "encoder", "memory", **options)
        self.memory = StoppableWire(config)
        super().__init__(layout, n_pages, config, self.memory)

    def freeze(self) -> None:
        self.memory.is_frozen = True

    def thaw(self) -> None:
        self.memory.is_frozen = False

    def kill(self) -> None:
        self.memory.close()


def memory_importer(
    layout: PageLayout, n_pages: int, *, cluster_key: bytes, **options: Any
) -> KVImporter:
    config = TransferConfig(cluster_key, "decoder", "memory", **options)
    return KVImporter(layout, n_pages, config, StoppableWire(config))

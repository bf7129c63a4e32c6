"""Exporters and importers over the transport within one process, as tests want them."""

from __future__ import annotations

from typing import Any

from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.memory_wire import MemoryWire
from cluster.common.kv.wire import TransferConfig
from tests.support.waiting import wait_until as wait_until


class MemoryExporter(KVExporter):
    def __init__(
        self, layout: PageLayout, n_pages: int, *, cluster_key: bytes, **options: Any
    ) -> None:
        config = TransferConfig(cluster_key, "encoder", "memory", **options)
        self.memory = MemoryWire(config)
        super().__init__(layout, n_pages, config, self.memory)

    def freeze(self) -> None:
        self.memory.freeze()

    def thaw(self) -> None:
        self.memory.thaw()

    def kill(self) -> None:
        self.memory.close()


def memory_importer(
    layout: PageLayout, n_pages: int, *, cluster_key: bytes, **options: Any
) -> KVImporter:
    config = TransferConfig(cluster_key, "decoder", "memory", **options)
    return KVImporter(layout, n_pages, config, MemoryWire(config))

"""The setting says what both ends hand over, and each refuses what is of another setting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cluster.common.errors import HandleRefusedError
from cluster.common.kv.connect import LANDING_WINDOWS, make_exporter, make_importer, make_kv_pool
from cluster.common.kv.handles import sign
from cluster.common.kv.layout import PageLayout
from cluster.common.messages import CrossKVHandle
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from tests.support.checkpoints import cached_checkpoint
from tests.support.kv.ends import MemoryExporter, memory_importer

KEY = b"key"
LAYOUTS: dict[str, PageLayout] = {
    "cross_kv": PageLayout("handoff", 1, 1, 4, 10, 5, "float32"),
    "encoder_states": PageLayout.of_states("handoff", 8, 10, "float32"),
}
MODES = [("cross_kv", "encoder_states"), ("encoder_states", "cross_kv")]
DEADLINE_S = 30.0


@pytest.fixture
def exporters() -> Iterator[dict[str, MemoryExporter]]:
    made = {name: MemoryExporter(one, 4, cluster_key=KEY) for name, one in LAYOUTS.items()}
    yield made
    for exporter in made.values():
        exporter.close()


def publish(exporter: MemoryExporter) -> CrossKVHandle:
    pages = exporter.reserve(exporter.layout.pages_per_window, DEADLINE_S)
    assert pages is not None
    return exporter.publish(pages, request_id="r", window=0, attempt=0, frames=10)


@pytest.mark.parametrize(("own", "other"), MODES)
def test_the_other_payload_is_refused(
    exporters: dict[str, MemoryExporter], own: str, other: str
) -> None:
    """Also where it claims to be the importer's: signed, so by one of ours, but wrong."""
    importer = memory_importer(LAYOUTS[own], 4, cluster_key=KEY)
    handle = publish(exporters[other])
    lying = sign(replace(handle, payload=own), KEY)  # type: ignore[arg-type]
    for wrong, told in ((handle, other), (lying, own)):
        with pytest.raises(HandleRefusedError, match=f"for {told} in layout .* settings"):
            importer.accept(wrong)
    assert importer.refused() == {"layout": 2}
    importer.close()


@pytest.mark.parametrize("mode", ["cross_kv", "encoder_states"])
@pytest.mark.parametrize("kv_windows", [2, LANDING_WINDOWS + 1])
def test_the_setting_says_what_is_handed_over(mode: str, kv_windows: int) -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    settings = settings_of(mode, encoder={"export_windows": 2}, decoder={"kv_windows": kv_windows})
    exporter = make_exporter(checkpoint, settings, "cpu", "encoder")
    importer = make_importer(checkpoint, settings, "cpu", "decoder")
    kv_pool = make_kv_pool(checkpoint, settings, "cpu")
    assert (exporter.layout.payload, importer.layout.payload) == (mode, mode)
    assert exporter.pool.n_pages == 2
    if mode == "cross_kv":
        assert (importer.pool.n_pages, kv_pool) == (kv_windows, None)
    else:
        assert importer.pool.n_pages == min(kv_windows, LANDING_WINDOWS)
        assert kv_pool is not None
        assert (kv_pool.n_pages, kv_pool.layout.payload) == (kv_windows, "cross_kv")
    importer.close()
    exporter.close()


def settings_of(mode: str, **roles: Any) -> Settings:
    flags = {"handoff": mode, "transport": "memory", "cluster_key": "k" * 32, **roles}
    return load_settings(flags=flags, environ={})

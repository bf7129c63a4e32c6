"""One importer for both payloads: each handle goes to its pool, and nothing opens for forgers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from cluster.errors import (
    ConfigurationError,
    HandleRefusedError,
    PeerLostError,
    WorkerDrainingError,
)
from cluster.kv.handles import sign
from cluster.kv.importer import KVImporter
from cluster.kv.layout import KVLayout, StatesLayout
from cluster.kv.payloads import HandoffImporter, make_exporters, make_handoff_importer
from cluster.kv.transfer_config import TransferConfig
from cluster.kv.wires.memory_wire import MemoryWire
from cluster.messages import CrossKVHandle
from cluster.model.checkpoint import open_checkpoint
from cluster.settings import Settings
from cluster.settings_sources import load_settings
from tests.support.checkpoints import cached_checkpoint
from tests.support.kv.ends import MemoryExporter, memory_importer
from tests.support.kv.host import wait_for

KEY = b"key"
KV = KVLayout("handoff", 1, 1, 4, 10, 5, "float32")
STATES = StatesLayout("handoff", 8, 10, "float32")
DEADLINE_S = 30.0


@dataclass
class Pair:
    """Exporters of both payloads, and importers made so far."""

    exporters: dict[str, MemoryExporter] = field(default_factory=dict)
    opened: int = 0

    def open_landing(self) -> KVImporter:
        self.opened += 1
        return memory_importer(STATES, 3, cluster_key=KEY)

    def importer(self, expects_states: bool = False) -> HandoffImporter:
        made = HandoffImporter(memory_importer(KV, 4, cluster_key=KEY), self.open_landing)
        if expects_states:
            made.open_landing()
        return made

    def publish(self, payload: str, value: float = 1.0) -> CrossKVHandle:
        exporter = self.exporters[payload]
        pages = exporter.reserve(exporter.layout.pages_per_window, DEADLINE_S)
        assert pages is not None
        exporter.pool.tensor[list(pages)] = value
        return exporter.publish(pages, request_id="r", window=0, attempt=0, frames=10)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    for layout in (KV, STATES):
        made.exporters[layout.payload] = MemoryExporter(layout, 4, cluster_key=KEY)
    yield made
    for exporter in made.exporters.values():
        exporter.close()


def read(importer: HandoffImporter, handle: CrossKVHandle) -> torch.Tensor:
    importer.accept(handle)
    pool = importer.pool_for(handle)
    pages = pool.allocate(pool.layout.pages_per_window)
    assert pages is not None
    importer.fetch(handle, pages).result(DEADLINE_S)
    copied = pool.tensor[list(pages)].clone()
    pool.release(pages)
    return copied


def test_each_payload_lands_in_its_pool(pair: Pair) -> None:
    importer = pair.importer(expects_states=True)
    assert pair.opened == 1
    assert importer.landing_pool is not None
    for n in range(3):
        assert bool((read(importer, pair.publish("cross_kv", n)) == n).all())
        assert bool((read(importer, pair.publish("encoder_states", -n)) == -n).all())
    assert pair.opened == 1
    assert importer.pool.layout is KV
    importer.pool.check_integrity()
    importer.landing_pool.check_integrity()
    importer.close()


def test_a_landing_pool_opens_with_the_first_states_and_once(pair: Pair) -> None:
    importer = pair.importer()
    read(importer, pair.publish("cross_kv"))
    assert (pair.opened, importer.landing_pool) == (0, None)
    importer.accept(pair.publish("encoder_states"))
    importer.accept(pair.publish("encoder_states"))
    assert pair.opened == 1
    importer.close()
    importer.close()


@pytest.mark.parametrize(
    "changes", [{"payload": "cross_kv"}, {"frames": 3}, {"signature": b""}, {"lease": "0" * 32}]
)
def test_a_forged_handle_opens_nothing(pair: Pair, changes: dict[str, Any]) -> None:
    importer = pair.importer()
    handle = pair.publish("encoder_states")
    with pytest.raises(HandleRefusedError, match="signature"):
        importer.accept(replace(handle, **changes))
    assert pair.opened == 0
    importer.close()


@pytest.mark.parametrize("nonsense", [None, "a handle", 7])
def test_what_is_no_handle_is_refused(pair: Pair, nonsense: Any) -> None:
    importer = pair.importer()
    with pytest.raises(HandleRefusedError):
        importer.accept(nonsense)
    importer.close()


def test_a_payload_under_the_others_layout_is_refused(pair: Pair) -> None:
    """Signed, so by one of ours, but wrong."""
    importer = pair.importer(expects_states=True)
    for payload, other in (("cross_kv", "encoder_states"), ("encoder_states", "cross_kv")):
        lying = sign(replace(pair.publish(payload), payload=other), KEY)  # type: ignore[arg-type]
        with pytest.raises(HandleRefusedError, match=f"for {other} in layout"):
            importer.accept(lying)
    importer.close()


def test_a_closed_importer_opens_nothing(pair: Pair) -> None:
    importer = pair.importer()
    importer.close()
    assert importer.healthy() is not None
    with pytest.raises((HandleRefusedError, WorkerDrainingError)):
        importer.accept(pair.publish("encoder_states"))
    assert pair.opened == 0


def test_an_unwell_half_makes_the_whole_unwell(pair: Pair) -> None:
    importer = pair.importer(expects_states=True)
    assert importer.healthy() is None
    assert importer._landing is not None
    importer._landing.close()
    assert "closed" in (importer.healthy() or "")
    importer.close()


def test_a_dropped_handle_frees_the_exporters_page(pair: Pair) -> None:
    importer = pair.importer()
    handles = [pair.publish(payload) for payload in ("cross_kv", "encoder_states")]
    for handle in handles:
        importer.accept(handle)
        importer.drop(handle)
    importer.close()
    for exporter in pair.exporters.values():
        wait_for(lambda one=exporter: one.active_leases() == 0, "the page is free")  # type: ignore[misc]


def test_the_setting_says_which_exporters_there_are() -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    expected = {
        "cross_kv": ["cross_kv"],
        "encoder_states": ["encoder_states"],
        "auto": ["cross_kv", "encoder_states"],
    }
    for mode, payloads in expected.items():
        settings = settings_of(mode, encoder={"export_windows": 2})
        exporters = make_exporters(checkpoint, settings, "cpu", "encoder")
        assert [one.layout.payload for one in exporters] == payloads
        assert [one.pool.n_pages for one in exporters] == [2] * len(payloads)
        for one in exporters:
            one.close()


@pytest.mark.parametrize(
    ("mode", "kv_windows", "landing"),
    [("cross_kv", 2, None), ("auto", 2, 2), ("encoder_states", 33, 32)],
)
def test_the_setting_says_whether_a_landing_pool_is_open(
    mode: str, kv_windows: int, landing: int | None
) -> None:
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    settings = settings_of(mode, decoder={"kv_windows": kv_windows})
    importer = make_handoff_importer(checkpoint, settings, "cpu", "decoder")
    assert importer.pool.n_pages == kv_windows
    assert (importer.landing_pool and importer.landing_pool.n_pages) == landing
    importer.close()


def settings_of(mode: str, **roles: Any) -> Settings:
    flags = {"handoff": mode, "transport": "memory", "cluster_key": "k", **roles}
    return load_settings(flags=flags, environ={})


@pytest.mark.parametrize("make", [make_exporters, make_handoff_importer])
def test_an_end_that_cannot_be_made_closes_those_before_it(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., object]
) -> None:
    """`handoff: auto` wants two ends; here the second one's transport does not start."""
    made: list[MemoryWire] = []

    def first_only(config: TransferConfig) -> MemoryWire:
        if made:
            raise ConfigurationError("no room for the second pool")
        made.append(MemoryWire(config))
        return made[0]

    monkeypatch.setattr("cluster.kv.payloads.make_wire", first_only)
    checkpoint = open_checkpoint(str(cached_checkpoint()))
    settings = settings_of("auto", encoder={"export_windows": 1}, decoder={"kv_windows": 1})
    with pytest.raises(ConfigurationError, match="second pool"):
        make(checkpoint, settings, "cpu", "worker")
    with pytest.raises(PeerLostError):  # whoever is still open could be connected to
        MemoryWire(TransferConfig(KEY, "peer")).connect(made[0].agent, b"")

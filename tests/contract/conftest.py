"""Encoders and readers for the KV contract tests, on every transport.

Exporters of nixl (shared memory) and nixl-tcp (sockets) have processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.common.kv.connect import available_transport
from cluster.common.kv.wire import LEASE_S
from tests.support.kv.host import (
    LAYOUTS,
    LocalHost,
    MakeHost,
    ProcessHost,
    WorkerProcess,
    device,
    make_importer,
)


@pytest.fixture(scope="session")
def processes() -> Iterator[list[WorkerProcess]]:
    """Worker processes that are free; a test takes some and gives back those that still run."""
    free: list[WorkerProcess] = []
    yield free
    for process in free:
        process.end()


@pytest.fixture(
    params=[
        "memory",
        "memory-states",
        "memory-whole",
        "nixl",
        pytest.param("nixl-whole", marks=pytest.mark.slow),
        pytest.param("nixl-states", marks=pytest.mark.slow),
        pytest.param("nixl-tcp", marks=pytest.mark.slow),
        pytest.param("memory-cuda", marks=pytest.mark.gpu),
        pytest.param("nixl-cuda", marks=pytest.mark.gpu),
    ]
)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param.startswith("nixl") and available_transport() != "nixl":
        pytest.skip("NIXL does not load on this machine")
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    if request.param.endswith("-cuda"):
        monkeypatch.setenv("CONTRACT_DEVICE", "cuda")
    return str(request.param)


@pytest.fixture
def transport(mode: str) -> str:
    return mode.partition("-")[0]


@pytest.fixture
def payload(mode: str) -> str:
    kinds = {"states": "encoder_states", "whole": "cross_kv whole"}
    return kinds.get(mode.partition("-")[2], "cross_kv")


@pytest.fixture
def make_host(
    mode: str, transport: str, payload: str, processes: list[WorkerProcess]
) -> Iterator[MakeHost]:
    hosts: list[Any] = []
    taken: list[WorkerProcess] = []
    environment = {"UCX_TLS": "tcp"} if mode == "nixl-tcp" else {}
    environment |= {"CONTRACT_DEVICE": device()}

    def make(n_windows: int = 4, lease_s: float = LEASE_S, kind: str = "exporter") -> Any:
        args: tuple[Any, ...] = (transport, payload)
        if kind == "exporter":
            args += (n_windows, lease_s)
        if transport == "memory":
            hosts.append(LocalHost(*args))
        else:
            taken.append(processes.pop() if processes else WorkerProcess())
            hosts.append(ProcessHost(taken[-1], kind, environment, *args))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
    for process in taken:
        if process.alive:
            processes.append(process)
        else:
            process.end()


@pytest.fixture
def make_reader(mode: str, transport: str, payload: str) -> Iterator[MakeHost]:
    importers = []

    def make(n_windows: int = 4, **settings: Any) -> Any:
        layout = settings.pop("layout", LAYOUTS[payload])
        importer = make_importer(transport, layout, n_windows, **settings)
        importers.append(importer)
        return importer

    yield make
    for importer in importers:
        importer.close()

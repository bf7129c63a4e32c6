"""When both roles are ready: `kernels: wait` and `kernels: background`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from cluster.common.kernels.cpu import background
from cluster.common.kernels.cpu.background import InBackground
from cluster.common.settings import Kernels, Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.in_process import local_engines
from decoder_worker import engine as decoder_engine
from encoder_worker import engine as encoder_engine

PATIENCE_S = 120.0


@pytest.fixture
def may_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, a kernel is being built that this process has asked for."""
    monkeypatch.setattr(background, "BUILDS_S", PATIENCE_S)
    held = threading.Event()
    building = InBackground("held", lambda: held.wait(PATIENCE_S))
    yield held
    held.set()
    assert building.wait(PATIENCE_S)


def settings_of(kernels: Kernels) -> Settings:
    role = {"device": "cpu", "dtype": "float32"}
    flags = {"kernels": kernels, "encoder": role, "decoder": role}
    return load_settings(None, flags, environ={})


async def start(kernels: Kernels, ready: asyncio.Event) -> None:
    async with local_engines(settings_of(kernels)):
        ready.set()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The roles whose engines have begun to wait, in order."""
    roles: list[str] = []

    def noted(role: str) -> Callable[[float], bool]:
        def wait(timeout_s: float) -> bool:
            roles.append(role)
            return background.wait_for_builds(timeout_s)

        return wait

    for role, engine in (("encoder", encoder_engine), ("decoder", decoder_engine)):
        monkeypatch.setattr(engine, "wait_for_builds", noted(role))
    return roles


async def test_workers_are_ready_once_their_kernels_are_built(
    may_end: threading.Event, waiting: list[str]
) -> None:
    """Else the first answers would be torch's, which rounds in another way."""
    ready = asyncio.Event()
    starting = asyncio.create_task(start("wait", ready))
    async with asyncio.timeout(PATIENCE_S):
        while not waiting:
            assert not starting.done(), "it did not wait"
            await asyncio.sleep(0.01)
        assert not ready.is_set()
        may_end.set()
        await starting
    assert ready.is_set()
    assert waiting == ["decoder"], "for the kernels of both, so that there is one bound"


async def test_workers_that_are_to_serve_at_once_wait_for_no_kernel(
    may_end: threading.Event, waiting: list[str]
) -> None:
    await asyncio.wait_for(start("background", asyncio.Event()), PATIENCE_S)
    assert not may_end.is_set()
    assert not waiting

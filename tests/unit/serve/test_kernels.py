"""Workers are ready once their kernels are built."""

from __future__ import annotations

import asyncio
import threading

import pytest

from cluster.common.kernels.cpu import background
from cluster.common.kernels.cpu.background import InBackground
from cluster.common.settings_sources import load_settings
from cluster.serve.in_process import local_engines

PATIENCE_S = 120.0


async def test_workers_are_ready_once_their_kernels_are_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long that takes: else the first answers would be torch's, which rounds otherwise."""
    monkeypatch.setattr(background, "TELL_S", 0.01)
    told = threading.Event()
    monkeypatch.setattr(background.logger, "info", lambda *_: told.set())
    may_end = threading.Event()
    building = InBackground("held", lambda: may_end.wait(PATIENCE_S))
    ready = asyncio.Event()

    async def start() -> None:
        role = {"device": "cpu", "dtype": "float32"}
        async with local_engines(load_settings(None, {"encoder": role, "decoder": role}, {})):
            assert building.get()
            ready.set()

    starting = asyncio.create_task(start())
    try:
        assert await asyncio.to_thread(told.wait, PATIENCE_S)
        assert not ready.is_set()
    finally:
        may_end.set()
    await asyncio.wait_for(starting, PATIENCE_S)
    assert ready.is_set()

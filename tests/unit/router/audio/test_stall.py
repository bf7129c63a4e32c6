"""An audio worker that stands still is replaced, and no upload pays for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support.audio.audio_pools import PATIENCE_S, freeze_on, pids, running, until
from tests.support.audio.sounds import voice, write_wav


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.audio.pool.STALLED_LOOKS", 2)


async def test_a_worker_frozen_while_idle_is_replaced(tmp_path: Path) -> None:
    clip = write_wav(tmp_path / "clip", voice(2.0))
    async with running() as pool:
        (frozen,) = pids(pool)
        os.kill(frozen, signal.SIGSTOP)
        async with pool.open(clip, request_id="r", timeout_s=PATIENCE_S) as stream:
            windows = [window async for window in stream]
        assert len(windows) == 1
        assert frozen not in pids(pool)


async def test_an_upload_goes_on_where_its_frozen_worker_stopped(tmp_path: Path) -> None:
    """Unlike one that takes too long, it is not to blame, and no window comes twice."""
    path = write_wav(tmp_path / "long", voice(400.0))
    async with running() as pool:
        async with pool.open(path, request_id="r", timeout_s=PATIENCE_S) as stream:
            expected = [window.start_sample async for window in stream]
        async with pool.open(path, request_id="r", timeout_s=PATIENCE_S) as stream:
            found = [(await anext(stream)).start_sample]
            frozen = await freeze_on(pool, stream)
            found += [window.start_sample async for window in stream]
        assert found == expected
        assert frozen not in pids(pool)


async def test_a_worker_at_work_is_not_taken_for_a_frozen_one(tmp_path: Path) -> None:
    """Looked at as often as can be, while it decodes and while it is idle."""
    path = write_wav(tmp_path / "long", voice(100.0))
    async with running() as pool:
        before = pids(pool)
        (worker,) = pool._workers
        async with pool.open(path, request_id="r", timeout_s=PATIENCE_S) as stream:
            async for _ in stream:
                worker.n_silent()
        await until(lambda: worker.n_silent() == 0)
        assert pids(pool) == before

"""The window that a router sends before any request, and how long a server waits for it."""

from __future__ import annotations

import asyncio

import pytest

from cluster.common.errors import WorkerGoneError
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from cluster.common.settings_sources import load_settings
from cluster.planning.virtual_time import virtual_clock
from router.pipeline import Pipeline
from router.warm_up import LONGEST_S, WarmUp, first_window
from tests.support.played_pools import PlayedPools

ON_VIRTUAL_TIME = True  # read by this room's conftest.py


async def send(pools: PlayedPools) -> None:
    clock = virtual_clock(0)
    settings, silent = load_settings(environ={}).router, silent_recorder(ROUTER_METRICS)
    pipeline = Pipeline(pools, pools, settings, silent, clock=clock, reuses_kv=False)
    await first_window(pipeline, "en", lambda frames: 128, clock)


async def test_silence_goes_through_both_pools_and_is_kept_nowhere(pools: PlayedPools) -> None:
    await send(pools)
    (encoded,), (decoded,) = pools.encoded, pools.decoded
    assert encoded.audio_key == b""
    assert encoded.context == 128
    assert not encoded.pcm.any()
    assert decoded.options.language == "en"


async def test_pools_that_fail_keep_nobody_waiting(
    pools: PlayedPools, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "router")
    pools.encode_fault = lambda window, nth: WorkerGoneError("it died")
    await send(pools)
    assert "failed" in caplog.text
    assert not pools.decoded


async def test_a_server_waits_for_it_once_its_pools_are_ready_and_only_for_a_moment() -> None:
    answered = asyncio.Event()

    async def window() -> None:
        await answered.wait()

    clock = virtual_clock(0)
    warm_up = WarmUp(clock)
    assert not warm_up.holds(), "nothing was sent"
    warm_up.begin([window()])
    await clock.sleep(60.0)  # pools that are not ready are not waited for here
    assert warm_up.holds()
    await clock.sleep(LONGEST_S / 2)
    assert warm_up.holds()
    answered.set()
    await clock.sleep(0.0)
    assert not warm_up.holds()

    late = WarmUp(clock)
    late.begin([asyncio.sleep(3600.0)])
    assert late.holds()
    await clock.sleep(LONGEST_S)
    assert not late.holds()
    late.close()

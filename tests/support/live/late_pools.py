"""Engines with a real model behind a virtual clock: as late as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from anyio.from_thread import start_blocking_portal

from cluster.common.messages import (
    SAMPLE_RATE,
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    Pcm,
)
from cluster.common.metrics import ROUTER_METRICS, silent_recorder
from cluster.common.settings import LivePolicy, Settings
from cluster.planning.virtual_time import run_virtually, virtual_clock
from cluster.serve.in_process import LocalEngines, local_engines
from cluster.serve.model_parts import make_live_engine
from router.live.activity import VoiceActivity
from router.live.interface import LiveConfig, TurnFailed
from tests.support.live.virtual_sessions import Told, at_once, converse
from tests.support.requests import AnyPool


@dataclass(frozen=True)
class BackgroundEngines:
    """call: runs a coroutine function there, while the caller's loop does nothing else."""

    engines: LocalEngines
    call: Callable[..., Any]


@contextmanager
def background_engines(settings: Settings) -> Iterator[BackgroundEngines]:
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(local_engines(settings)) as engines,
    ):
        yield BackgroundEngines(engines, portal.call)


class LatePools(AnyPool):
    """Inside of a virtual loop. late_s: of the nth encode. fault: of the nth decode."""

    def __init__(
        self,
        background: BackgroundEngines,
        late_s: Callable[[int], float] = lambda nth: 0.05,
        fault: Callable[[int], Exception | None] = lambda nth: None,
    ) -> None:
        self._call = background.call
        self._encoders = background.engines.pool("encoder")
        self._decoders = background.engines.pool("decoder")
        self._late_s = late_s
        self._fault = fault
        self._encodes = self._decodes = 0

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        self._encodes += 1
        await asyncio.sleep(self._late_s(self._encodes))
        return self._call(self._encoders.encode, request)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        self._decodes += 1
        if (error := self._fault(self._decodes)) is not None:
            raise error
        return self._call(self._decoders.decode, request)


def hear(
    background: BackgroundEngines,
    pcm: Pcm,
    config: LiveConfig,
    pools: LatePools,
    policy: LivePolicy = "auto",
) -> Told:
    """A session that speaks in real time, a second of silence, and a commit, on a virtual clock."""

    async def run() -> Told:
        clock = virtual_clock()
        activity = VoiceActivity(sleep=clock.sleep, run=at_once)
        engines = background.engines
        live = engines.settings.router.live.model_copy(update={"policy": policy})
        router = engines.settings.router.model_copy(update={"live": live})
        engine = make_live_engine(
            engines.settings.model_copy(update={"router": router}),
            engines.checkpoint,
            pools,
            pools,
            activity,
            silent_recorder(ROUTER_METRICS),
            clock=clock,
        )
        played: Any = SimpleNamespace(engine=engine, clock=clock)
        told = await converse(played, np.append(pcm, np.zeros(SAMPLE_RATE, np.int16)), config)
        await engine.close()
        await activity.close()
        assert not told.of(TurnFailed)
        return told

    return run_virtually(run())

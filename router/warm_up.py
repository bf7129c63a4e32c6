"""A router's first window of each model: a second of silence through both pools, for nobody. The
first call of a worker opens connections, some tens of ms, which the first request would pay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import SplitscribeError
from cluster.common.messages import SAMPLE_RATE, DecodeOptions
from router.interface import RequestContext
from router.pipeline import Pipeline, RequestRun, WindowAudio

logger = logging.getLogger(__name__)

LONGEST_S = 2.0  # how long it may hold back a server whose pools are ready
PATIENCE_S = 900.0  # for workers, whose models may have to be loaded
MAX_TOKENS = 2


async def first_window(
    pipeline: Pipeline,
    language: str | None,
    context_for: Callable[[int], int] | None,
    clock: Clock = SYSTEM_CLOCK,
) -> None:
    """Encode and decode silence; failures are logged. language: None if there are several."""
    run = RequestRun(RequestContext.unlimited("warm-up", PATIENCE_S, clock))
    audio = WindowAudio.of_samples(0, np.zeros(SAMPLE_RATE, dtype=np.int16), context_for)
    try:
        await pipeline.decode(run, audio, DecodeOptions(language, max_new_tokens=MAX_TOKENS))
    except SplitscribeError as error:
        logger.info("the first window, which was nobody's, failed: %s", error)


class WarmUp:
    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._since_s: float | None = None  # all pools are ready

    def begin(self, windows: Sequence[Coroutine[Any, Any, None]]) -> None:
        self._tasks = [asyncio.create_task(window) for window in windows]

    def holds(self) -> bool:
        """Whether a server whose pools are ready should wait for them before it says so."""
        if all(task.done() for task in self._tasks):
            return False
        now_s = self._clock.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s < LONGEST_S

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

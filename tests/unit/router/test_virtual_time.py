"""The real admission, deadlines and pipeline on a virtual clock: a hundred routers, no waiting."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.common.clock import Clock
from cluster.common.errors import DeadlineExceededError, OverloadedError
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings
from cluster.planning.virtual_time import STANDS_STILL, run_virtually, virtual_clock
from router.api.params import TranscriptionParams
from router.http.admission import BYTES_PER_AUDIO_S, Admission
from router.interface import RequestContext
from router.transcriber import RequestTranscriber
from tests.support.checkpoints import cached_checkpoint
from tests.support.played_pools import PlayedAudio, PlayedPools

CHECKPOINT = open_checkpoint(str(cached_checkpoint("micro")))
SETTINGS = RouterSettings()
PARAMS = TranscriptionParams(model="demo", language="en")
AUDIO_S = 6.0  # three windows of 2 s
UPLOAD_BYTES = round(AUDIO_S * BYTES_PER_AUDIO_S)
STALL_S = 120.0


@dataclass
class PlayedRouter:
    """One router over pools that are full until `busy_until_s`. Room: for one upload's audio."""

    pools: PlayedPools
    clock: Clock
    busy_until_s: float

    def __post_init__(self) -> None:
        self.admission = Admission(AUDIO_S, self.clock.monotonic)
        parts: Any = (PlayedAudio(3), self.pools, self.pools, self.pools.tokenizer)
        self.transcriber = RequestTranscriber(
            *parts, SETTINGS, dims=CHECKPOINT.dims, clock=self.clock
        )
        self.pools.decode_fault = lambda window, nth: (
            OverloadedError("full") if self.clock.monotonic() < self.busy_until_s else None
        )

    async def transcribe(self) -> tuple[str, float]:
        """The text of one upload, and how long it took."""
        with self.admission.admit(UPLOAD_BYTES) as share:
            context = RequestContext("r", share, STALL_S, clock=self.clock)
            result = await self.transcriber.transcribe(Path("none"), PARAMS, context)
            return result.transcript.text, self.clock.monotonic() - context.started_s


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(CHECKPOINT)


def test_a_hundred_routers_wait_for_full_pools_and_a_seed_repeats_the_run(
    tokenizer: WhisperTokenizer,
) -> None:
    async def work() -> list[tuple[str, float]]:
        routers = [
            PlayedRouter(PlayedPools(tokenizer), virtual_clock(seed), busy_until_s=20.0)
            for seed in range(100)
        ]
        return await asyncio.gather(*(router.transcribe() for router in routers))

    first, second = run_virtually(work()), run_virtually(work())
    assert first == second
    assert {text for text, _ in first} == {"word0 word1 word2"}
    taken = [seconds for _, seconds in first]
    assert 20.0 <= min(taken) <= max(taken) < 23.0, "the longest pause is 2 s"
    assert len(set(taken)) > 90, "routers do not come back all at once"


def test_a_request_ends_at_its_deadline_and_makes_room_for_the_next(
    tokenizer: WhisperTokenizer,
) -> None:
    async def work() -> None:
        clock = virtual_clock()
        router = PlayedRouter(PlayedPools(tokenizer), clock, busy_until_s=200.0)
        waiting = asyncio.ensure_future(router.transcribe())
        await clock.sleep(1.0)
        with pytest.raises(OverloadedError) as refusal:
            await router.transcribe()
        assert refusal.value.retry_after_s
        with pytest.raises(DeadlineExceededError):
            await waiting
        assert clock.monotonic() == pytest.approx(STALL_S, abs=0.1)
        text, seconds = await router.transcribe()
        assert text == "word0 word1 word2"
        assert seconds == pytest.approx(200.0 - STALL_S, abs=3.0)

    run_virtually(work())


def test_waiting_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=STANDS_STILL):
        run_virtually(asyncio.Event().wait())

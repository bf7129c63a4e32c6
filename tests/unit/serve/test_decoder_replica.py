"""A decoder's replica over an engine that the test plays."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise

import pytest

from cluster.common.messages import (
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    DecodeTimings,
    OnToken,
    SampledToken,
)
from cluster.common.settings_sources import load_settings
from cluster.planning.virtual_time import run_virtually
from cluster.serve.replicas.decoder_replica import STREAM_S, DecoderWorker, grouped
from tests.support.checkpoints import cached_checkpoint
from tests.support.kv.stub_wire import make_handle

RESULT = DecodeResult(
    "r", 0, (1, 2), (-0.1, -0.1), -0.1, 0.0, "en", 0.0, "stop",
    DecodeTimings(0.0, 0.0, 1, "memory", 0.0, 0.0, 2),
)  # fmt: skip


@pytest.mark.usefixtures("as_replica")
async def test_the_last_token_is_streamed_though_the_result_is_there_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The event loop hears of a token later than the engine gives its result."""
    settings = load_settings(
        None,
        {
            "model": str(cached_checkpoint()),
            "cluster_key": "k" * 32,
            "transport": "memory",
            "decoder": {"threads": 1, "device": "cpu", "kv_windows": 1},
        },
        environ={},
    )
    worker = DecoderWorker(settings, "build")
    answer: Future[DecodeResult] = Future()
    told: list[OnToken] = []

    def submit(request: DecodeRequest, on_token: OnToken) -> Future[DecodeResult]:
        told.append(on_token)
        on_token(first)
        return answer

    first, last = SampledToken(1, -0.1, 0.0), SampledToken(2, -0.1, 0.0)
    monkeypatch.setattr(worker._engine, "submit", submit)
    stream = worker.decode_stream(DecodeRequest("r", 0, 0, make_handle(), DecodeOptions(), 30.0))
    assert await anext(stream) == (first,)
    told[0](last)
    answer.set_result(RESULT)
    load = worker._engine.load()
    assert [group async for group in stream] == [(last,), replace(RESULT, load=load)]
    await worker.shut_down()


def test_the_first_token_is_streamed_at_once_and_later_ones_in_few_messages() -> None:
    """50 tokens a second for a second, the first one after 0.5 s; on a virtual clock."""
    step_s, n_tokens = 0.02, 50

    async def stream() -> list[tuple[float, tuple[int, ...]]]:
        clock = asyncio.get_running_loop().time
        sampled: asyncio.Queue[SampledToken | None] = asyncio.Queue()

        async def sample() -> None:
            await asyncio.sleep(0.5)
            for token in range(n_tokens):
                sampled.put_nowait(SampledToken(token, -0.1, 0.0))
                await asyncio.sleep(step_s)
            sampled.put_nowait(None)

        sampling = asyncio.create_task(sample())
        told = [(clock(), tuple(t.token for t in group)) async for group in grouped(sampled)]
        assert clock() == pytest.approx(0.5 + n_tokens * step_s), "the end waits for nothing"
        await sampling
        return told

    told = run_virtually(stream())
    times = [at_s for at_s, _ in told]
    assert told[0] == (0.5, (0,))
    assert [token for _, group in told for token in group] == list(range(n_tokens))
    assert all(later - at_s >= STREAM_S - 1e-9 for at_s, later in pairwise(times[:-1]))
    assert len(told) <= 2 + n_tokens * step_s / STREAM_S

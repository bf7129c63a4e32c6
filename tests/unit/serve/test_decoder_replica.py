"""A decoder's replica over an engine that the test plays."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

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
from cluster.serve.replicas.decoder_replica import DecoderWorker
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

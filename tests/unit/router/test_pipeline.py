"""What a request's windows become: side by side, in order, told as they come, in whole or trimmed.

The pools are played; the real ones are in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from cluster.common.errors import KVLostError, WorkerGoneError
from cluster.common.messages import SAMPLE_RATE
from cluster.common.metrics import ROUTER_METRICS
from cluster.common.model.encoder_context import EncoderContext
from router.interface import Update
from tests.support.played_pools import (
    DIMS,
    PARAMS,
    SETTINGS,
    PlayedAudio,
    PlayedPools,
    request_of,
    run,
    transcribe,
)
from tests.support.traced import Traced, id_of, parent_of
from tests.support.workers.counted import Counted

ON_VIRTUAL_TIME = True  # read by this room's conftest.py


TRIMMED = partial(EncoderContext(64, 30.0).positions_for, n_audio_ctx=DIMS.n_audio_ctx)


async def test_windows_run_side_by_side_and_come_out_in_order(pools: PlayedPools) -> None:
    audio = PlayedAudio(20)
    text = await run(pools, audio)
    assert text == " ".join(f"word{n}" for n in range(20))
    assert 1 < pools.most_running <= SETTINGS.max_windows_in_flight
    assert audio.closed


@pytest.mark.parametrize("fields", [{}, {"max_completion_tokens": 100}])
async def test_what_a_window_leaves_undecoded_is_decoded_as_its_own(
    pools: PlayedPools, fields: dict[str, Any]
) -> None:
    """Window 1 answers up to 0.5 s and breaks off: its rest goes through both pools again."""
    pools.breaks_off = lambda window, nth: window == 1 and nth == 1
    text = await run(pools, params=replace(PARAMS, **fields))
    assert text == "word0 word1 word1 word2"
    assert pools.encodes == {0: 1, 1: 2, 2: 1}
    assert pools.lengths[1] == [2 * SAMPLE_RATE, 2 * SAMPLE_RATE - SAMPLE_RATE // 2]


async def test_a_limit_on_tokens_is_one_of_a_window_with_its_rest(pools: PlayedPools) -> None:
    pools.breaks_off = lambda window, nth: window == 1
    n_answered = len(pools.tokenizer.encode(" word1")) + 3 + len(pools.tokenizer.encode(" lost"))
    for limit, text in ((n_answered, "word1"), (n_answered + 5, "word1 word1")):
        pools.decodes.clear()
        params = replace(PARAMS, max_completion_tokens=limit)
        assert await run(pools, 2, params) == f"word0 {text}"
        assert pools.options[1].max_new_tokens == (5 if limit > n_answered else limit)


async def test_what_is_certain_is_told_in_order_and_is_the_whole(pools: PlayedPools) -> None:
    pools.delay_s = lambda window: 0.05 * (1 + window) if window % 3 == 0 else 0.0
    pools.decode_fault = lambda window, nth: WorkerGoneError("died") if window % 2 >= nth else None
    updates: list[Update] = []
    params = replace(PARAMS, logprobs=True)
    context = request_of(on_update=updates.append)
    transcript = (await transcribe(pools, 9, params, context)).transcript
    assert "".join(update.text for update in updates) == transcript.text
    assert tuple(s for update in updates for s in update.segments) == transcript.segments
    told = "".join(each.token for update in updates for each in update.logprobs)
    assert told.strip() == transcript.text
    assert len(updates) > 1


async def test_each_audio_has_its_own_name_and_each_owner_too(pools: PlayedPools) -> None:
    for owner in (b"", b"", b"one", b"another"):
        await run(pools, context=request_of(owner=owner))
    requests = [pools.encoded[n : n + 3] for n in range(0, 12, 3)]
    names = [{one.window: one.audio_key for one in windows} for windows in requests]
    assert names[0] == names[1]
    assert len({name for each in names for name in each.values()}) == 9


@pytest.mark.parametrize(("reused", "counts"), [(None, (0, 0)), (True, (3, 0)), (False, (0, 3))])
async def test_what_was_reused_is_counted(
    pools: PlayedPools, reused: bool | None, counts: tuple[int, int]
) -> None:
    pools.reused = reused
    timings = (await transcribe(pools)).timings
    assert (timings.cache_hits, timings.cache_misses) == counts


async def test_a_trace_has_a_span_of_every_window_and_call_and_tells_of_retries(
    pools: PlayedPools,
) -> None:
    """Each call is below its window, by the very context that the worker is sent."""
    pools.decode_fault = lambda window, nth: (
        KVLostError("gone") if window == 1 and nth == 1 else None
    )
    traced = Traced()
    with traced.tracer.root("request", "") as root:
        await run(pools, context=request_of(span=root), tracer=traced.tracer)
    spans = traced.all()
    (request,) = (span for span in spans if span.name == "request")
    windows = {id_of(span): span for span in spans if span.name == "window"}
    assert [parent_of(span) for span in windows.values()] == [id_of(request)] * 3
    calls = [span for span in spans if span.name.startswith("call ")]
    assert len(calls) == 2 * 3 + 2
    assert {parent_of(span) for span in calls} == set(windows)
    assert {f"{id_of(span):016x}" for span in calls} == {
        traceparent.split("-")[2] for traceparent in pools.traceparents
    }
    retried = [event for span in windows.values() for event in span.events]
    assert [dict(event.attributes or {}) for event in retried] == [
        {"splitscribe.reason": "KVLostError"}
    ]
    assert [span.status.description for span in calls].count("KVLostError") == 1


async def test_a_doubted_window_is_encoded_once_more_in_full(pools: PlayedPools) -> None:
    """Counted, in the trace, and whatever fails after the doubt is tried again in full."""
    pools.doubts, pools.reused = lambda window: window > 0, False
    pools.decode_fault = lambda window, nth: (
        KVLostError("gone") if window == 2 and nth == 2 else None
    )
    traced, counts = Traced(), Counted(ROUTER_METRICS)
    with traced.tracer.root("request", "") as root:
        result = await transcribe(
            pools,
            context=request_of(span=root),
            recorder=counts.recorder,
            context_for=TRIMMED,
            tracer=traced.tracer,
        )
    assert result.transcript.text == "word0 word1 word2"
    assert pools.contexts == {0: [192], 1: [192, 0], 2: [192, 0, 0]}
    assert pools.decodes == {0: 1, 1: 2, 2: 3}
    timings = result.timings
    assert (timings.windows, timings.attempts, timings.failures) == (3, 6, 1)
    assert (result.timings.cache_hits, result.timings.cache_misses) == (0, 3), "of each once"
    for name, count in {"trimmed_windows": 3, "doubted_windows": 2, "windows": 3}.items():
        assert sum(counts.of(f"splitscribe_{name}_total")) == count
    doubts = [event for span in traced.all() for event in span.events if event.name == "doubt"]
    assert [dict(event.attributes or {}) for event in doubts] == [{"splitscribe.context": 192}] * 2


async def test_an_unknown_language_is_settled_by_the_first_speech(pools: PlayedPools) -> None:
    pools.no_speech = lambda window: 0.9 if window == 0 else 0.0
    text = await run(pools, 5, replace(PARAMS, language=None))
    assert text == "word1 word2 word3 word4"
    assert pools.languages == {0: None, 1: None, 2: "de", 3: "de", 4: "de"}


async def test_a_language_is_sought_among_the_allowed_ones(pools: PlayedPools) -> None:
    several = replace(PARAMS, language=None, languages=("de", "fr"))
    await run(pools, 2, several)
    assert {request.options.languages for request in pools.decoded} == {("de", "fr")}
    assert pools.languages == {0: None, 1: "de"}
    await run(pools, 1, replace(several, languages=("fr",)))
    assert pools.languages[0] == "fr"


async def test_every_window_sees_hotwords_and_the_end_of_the_prompt(pools: PlayedPools) -> None:
    """Together they have half of the decoder's positions, less one."""
    words, prompt = "alpha beta", "one two three " * 200
    await run(pools, 3, replace(PARAMS, hotwords=words, prompt=prompt))
    for options in pools.options.values():
        text = pools.tokenizer.decode(options.prompt_tokens)
        assert len(options.prompt_tokens) == DIMS.n_text_ctx // 2 - 1
        assert text.startswith(" alpha beta")
        assert text.endswith(" one two three")


async def test_noise_differs_only_where_samples_were_asked_for(pools: PlayedPools) -> None:
    seeds = []
    for chance, temperature in enumerate((0.0, 0.0, 0.5, 0.5)):
        await run(pools, 1, replace(PARAMS, temperature=temperature), chance=chance)
        seeds.append(pools.options[0].seed)
    assert seeds[0] == seeds[1]
    assert seeds[2] != seeds[3]


async def test_cancelling_the_request_cancels_its_windows(pools: PlayedPools) -> None:
    task = asyncio.ensure_future(run(pools, 8))
    await pools.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pools.running == 0
    assert pools.cancelled

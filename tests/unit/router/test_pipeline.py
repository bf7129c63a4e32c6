"""The pipeline's own decisions: what is tried again, in which order, and what is given up.

The pools are played by in-test clients; the real ones are in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import (
    DeadlineExceededError,
    HandleRefusedError,
    InvalidAudioError,
    InvalidRequestError,
    KVLostError,
    LayoutMismatchError,
    OverloadedError,
    SequenceFailedError,
    WindowRefusedError,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerGoneError,
)
from cluster.common.messages import SAMPLE_RATE, DecodeOptions, EncodeRequest
from cluster.common.metrics import ROUTER_METRICS
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.encoder_context import EncoderContext
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import RouterSettings
from cluster.common.settings_sources import load_settings
from cluster.planning.virtual_time import virtual_clock
from cluster.serve.own_calls import key_of
from encoder_worker.core import check_request
from router.api.params import TranscriptionParams
from router.deadly_audio import REFUSED_S
from router.interface import Progress, RequestContext, TranscriptionResult, Update
from router.pipeline import RequestRun, WindowAudio
from router.transcriber import RequestTranscriber
from tests.support.checkpoints import cached_checkpoint
from tests.support.played_pools import PlayedAudio, PlayedPools, PlayedStream
from tests.support.traced import Traced, id_of, parent_of
from tests.support.workers.counted import Counted

ON_VIRTUAL_TIME = True  # read by this room's conftest.py


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("micro"))))


@pytest.fixture
def pools(tokenizer: WhisperTokenizer) -> PlayedPools:
    return PlayedPools(tokenizer)


DIMS = open_checkpoint(str(cached_checkpoint("micro"))).dims
TRIMMED = partial(EncoderContext(64, 30.0).positions_for, n_audio_ctx=DIMS.n_audio_ctx)
SETTINGS: RouterSettings = load_settings(environ={}).router
PARAMS = TranscriptionParams(model="demo", language="en")


def request_of(seconds: float = 30.0, **changes: Any) -> RequestContext:
    return replace(RequestContext.unlimited("r1", seconds, virtual_clock()), **changes)


async def transcribe(
    pools: PlayedPools,
    n: int | PlayedAudio = 3,
    params: TranscriptionParams = PARAMS,
    context: RequestContext | None = None,
    chance: int = 0,
    **options: Any,
) -> TranscriptionResult:
    """Of `n` windows. `chance` seeds all that the transcriber draws at random."""
    audio: Any = PlayedAudio(n) if isinstance(n, int) else n
    parts = (audio, pools, pools, pools.tokenizer, SETTINGS)
    transcriber = RequestTranscriber(*parts, dims=DIMS, clock=virtual_clock(chance), **options)
    return await transcriber.transcribe(Path("none"), params, context or request_of())


async def run(pools: PlayedPools, *arguments: Any, **options: Any) -> str:
    return (await transcribe(pools, *arguments, **options)).transcript.text


async def test_windows_run_side_by_side_and_come_out_in_order(pools: PlayedPools) -> None:
    audio = PlayedAudio(20)
    text = await run(pools, audio)
    assert text == " ".join(f"word{n}" for n in range(20))
    assert 1 < pools.most_running <= SETTINGS.max_windows_in_flight
    assert audio.closed


@pytest.mark.parametrize(
    "fields",
    [{}, {"fallback": False}, {"temperature": 0.2}, {"fallback": False, "logprobs": True}],
)
async def test_what_a_window_leaves_undecoded_is_decoded_as_its_own(
    pools: PlayedPools, fields: dict[str, Any]
) -> None:
    """Window 1 answers up to 0.5 s and breaks off: its rest goes through both pools again.

    What was not sent yet can be decoded on, whether or not there are further temperatures.
    """
    pools.breaks_off = lambda window, nth: window == 1 and nth == 1
    text = await run(pools, params=replace(PARAMS, **fields))
    assert text == "word0 word1 word1 word2"
    assert pools.encodes == {0: 1, 1: 2, 2: 1}
    assert pools.lengths[1] == [2 * SAMPLE_RATE, 2 * SAMPLE_RATE - SAMPLE_RATE // 2]


@pytest.mark.parametrize("is_silent", [False, True])
async def test_what_was_sent_token_by_token_is_not_taken_back_and_the_rest_comes_behind_it(
    pools: PlayedPools, is_silent: bool
) -> None:
    """Window 1 breaks off behind a word that was sent: its rest is forced to begin with that."""
    pools.breaks_off = lambda window, nth: window == 1
    pools.no_speech = lambda window: 0.9 * (is_silent and window == 1 and pools.decodes[1] == 2)
    updates: list[Update] = []
    context = request_of(on_update=updates.append)
    transcript = (
        await transcribe(pools, 3, replace(PARAMS, stream=True, fallback=False), context)
    ).transcript
    assert transcript.text == f"word0 word1 lost{'' if is_silent else ' found'} word2"
    assert "".join(update.text for update in updates) == transcript.text
    assert pools.encodes == {0: 1, 1: 2, 2: 1}
    assert pools.lengths[1] == [2 * SAMPLE_RATE, 2 * SAMPLE_RATE - SAMPLE_RATE // 2]
    prefix = pools.options[1].prefix_tokens
    begin = pools.tokenizer.special.timestamp_begin
    assert prefix == (begin, *pools.tokenizer.encode(" lost"))
    ends_s = 4.0 if is_silent else 3.5
    assert [(s.start, s.end) for s in transcript.segments[1:3]] == [(2.0, 2.5), (2.5, ends_s)]


async def test_what_follows_text_that_was_withheld_waits_for_it(pools: PlayedPools) -> None:
    """The first tokens may be silence, the rest of their window is none."""
    pools.breaks_off = lambda window, nth: True
    pools.no_speech = lambda window: 0.55 * (pools.decodes[0] == 1)
    updates: list[Update] = []
    gates = replace(PARAMS.gates, no_speech_prob=0.5)
    params = replace(PARAMS, stream=True, fallback=False, gates=gates)
    context = request_of(on_update=updates.append)
    assert (await transcribe(pools, 1, params, context)).transcript.text == "word0 lost found"
    assert [update.text for update in updates] == ["word0 lost found"]


async def test_a_window_of_so_many_tokens_is_not_decoded_on(pools: PlayedPools) -> None:
    pools.breaks_off = lambda window, nth: window == 1
    text = await run(pools, params=replace(PARAMS, max_completion_tokens=7))
    assert text == "word0 word1 word2"
    assert {one.max_new_tokens for one in pools.options.values()} == {7}


async def test_a_window_that_always_breaks_off_ends(pools: PlayedPools) -> None:
    pools.breaks_off = lambda window, nth: window == 1
    text = await run(pools)
    assert text == "word0 word1 word1 word1 word1 word2"


async def test_what_is_certain_is_told_in_order_and_is_the_whole(pools: PlayedPools) -> None:
    """Windows of uneven speed: joined updates equal the answer."""
    pools.delay_s = lambda window: 0.05 if window % 3 == 0 else 0.0
    updates: list[Update] = []
    params = replace(PARAMS, logprobs=True)
    context = request_of(on_update=updates.append)
    transcript = (await transcribe(pools, 9, params, context)).transcript
    assert "".join(update.text for update in updates) == transcript.text
    assert tuple(s for update in updates for s in update.segments) == transcript.segments
    told = "".join(each.token for update in updates for each in update.logprobs)
    assert told.strip() == transcript.text
    assert len(updates) > 1


async def test_a_stream_goes_on_behind_what_a_dead_worker_had_told(pools: PlayedPools) -> None:
    """Every window's first decoder dies after all tokens but one: each is told once."""
    pools.decode_fault = lambda window, nth: WorkerGoneError("died") if nth == 1 else None
    updates: list[Update] = []
    params = replace(PARAMS, stream=True, fallback=False)
    context = request_of(on_update=updates.append)
    transcript = (await transcribe(pools, 4, params, context)).transcript
    assert transcript.text == "word0 word1 word2 word3"
    assert "".join(update.text for update in updates) == transcript.text
    assert len(updates) > 4, "told by windows, not by tokens"


async def test_requests_in_flight_that_their_clients_call_alike_are_told_apart(
    pools: PlayedPools,
) -> None:
    """By whoever counts what is where; logs and handles have the client's own word."""
    await asyncio.gather(*(run(pools, 2, context=request_of()) for _ in range(2)))
    seen = [*pools.encoded, *pools.decoded]
    assert len({key_of(one) for one in seen}) == len(seen) == 8
    assert len({one.key for one in seen}) == 2
    assert {one.request_id for one in seen} == {"r1"}


async def test_a_request_s_class_goes_with_each_of_its_windows(pools: PlayedPools) -> None:
    await run(pools, 2, context=request_of(priority="live"))
    assert [one.priority for one in (*pools.encoded, *pools.decoded)] == ["live"] * 4


async def test_lost_kv_is_encoded_again(pools: PlayedPools) -> None:
    pools.decode_fault = lambda window, nth: (
        KVLostError("gone") if window == 1 and nth < 3 else None
    )
    text = await run(pools)
    assert text == "word0 word1 word2"
    assert pools.encodes == {0: 1, 1: 3, 2: 1}
    lost, *again = [one for one in pools.encoded if one.window == 1]
    assert [one.fresh for one in (lost, *again)] == [False, True, True], "though it may be kept"
    assert {one.audio_key for one in again} == {lost.audio_key} != {b""}


async def test_each_audio_has_its_own_name_and_each_owner_too(pools: PlayedPools) -> None:
    for owner in (b"", b"", b"one", b"another"):
        await run(pools, context=request_of(owner=owner))
    requests = [pools.encoded[n : n + 3] for n in range(0, 12, 3)]
    names = [{one.window: one.audio_key for one in windows} for windows in requests]
    assert names[0] == names[1]
    assert len({name for each in names for name in each.values()}) == 9


async def test_where_nothing_is_kept_no_audio_is_named(pools: PlayedPools) -> None:
    await run(pools, 1, reuses_kv=False)
    assert [one.audio_key for one in pools.encoded] == [b""]


@pytest.mark.parametrize(("reused", "counts"), [(None, (0, 0)), (True, (3, 0)), (False, (0, 3))])
async def test_what_was_reused_is_counted(
    pools: PlayedPools, reused: bool | None, counts: tuple[int, int]
) -> None:
    pools.reused = reused
    timings = (await transcribe(pools)).timings
    assert (timings.cache_hits, timings.cache_misses) == counts


async def test_a_dead_decoder_costs_no_encode(pools: PlayedPools) -> None:
    """The handle is still good: another decoder pulls the same KV."""
    pools.decode_fault = lambda window, nth: WorkerGoneError("died") if nth == 1 else None
    text = await run(pools)
    assert text == "word0 word1 word2"
    assert set(pools.encodes.values()) == {1}


async def test_who_waits_long_between_tries_encodes_again_what_is_gone_by_then(
    pools: PlayedPools,
) -> None:
    pools.decode_fault = lambda window, nth: WorkerGoneError("died") if nth <= 4 else None
    assert await run(pools, 1, context=request_of(1000.0)) == "word0"
    assert (pools.decodes, pools.encodes) == ({0: 5}, {0: 1}), "pauses of 3 s at most keep the KV"
    pools.decodes.clear()
    pools.decode_fault = lambda window, nth: WorkerGoneError("died") if nth <= 5 else None
    assert await run(pools, 1, context=request_of(1000.0)) == "word0"
    assert (pools.decodes, pools.encodes) == ({0: 6}, {0: 3}), "one of 6 s or more does not"


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


async def transcribe_trimmed(
    pools: PlayedPools, params: TranscriptionParams = PARAMS
) -> tuple[TranscriptionResult, Traced, Callable[[str], float]]:
    """The result, its trace, and the total of a counter by its name."""
    traced, counted = Traced(), Counted(ROUTER_METRICS)
    with traced.tracer.root("request", "") as root:
        result = await transcribe(
            pools,
            params=params,
            context=request_of(span=root),
            recorder=counted.recorder,
            context_for=TRIMMED,
            tracer=traced.tracer,
        )
    return result, traced, lambda name: sum(counted.of(f"splitscribe_{name}_total"))


async def test_a_doubted_window_is_encoded_once_more_in_full(pools: PlayedPools) -> None:
    """Counted, in the trace, and whatever fails after the doubt is tried again in full."""
    pools.doubts, pools.reused = lambda window: window > 0, False
    pools.decode_fault = lambda window, nth: (
        KVLostError("gone") if window == 2 and nth == 2 else None
    )
    result, traced, counted = await transcribe_trimmed(pools)
    assert result.transcript.text == "word0 word1 word2"
    assert pools.contexts == {0: [192], 1: [192, 0], 2: [192, 0, 0]}
    assert pools.decodes == {0: 1, 1: 2, 2: 3}
    timings = result.timings
    assert (timings.windows, timings.attempts, timings.failures) == (3, 6, 1)
    assert (result.timings.cache_hits, result.timings.cache_misses) == (0, 3), "of each once"
    assert counted("trimmed_windows") == 3
    assert counted("doubted_windows") == 2
    assert counted("windows") == 3
    doubts = [event for span in traced.all() for event in span.events if event.name == "doubt"]
    assert [dict(event.attributes or {}) for event in doubts] == [{"splitscribe.context": 192}] * 2


def test_a_context_holds_every_sample_also_without_slack() -> None:
    """An encoder refuses a window that does not fit its context: the client would get a 400."""
    rule = EncoderContext(slack=0, max_content_s=30.0)
    for n_samples in range(256 * 320 - 2, 256 * 320 + 3):
        pcm = np.zeros(n_samples, np.int16)
        audio = WindowAudio.of_samples(0, pcm, partial(rule.positions_for, n_audio_ctx=1500))
        assert audio.context == (256 if n_samples <= 256 * 320 else 320)
        check_request(EncodeRequest("r", 0, 1, pcm, 1.0, context=audio.context), 1500)


async def test_windows_whose_tokens_are_sent_at_once_get_all_positions(pools: PlayedPools) -> None:
    """What was sent is never taken back, so there would be no second look."""
    pools.doubts = lambda window: True
    params = replace(PARAMS, stream=True, fallback=False)
    result, _, counted = await transcribe_trimmed(pools, params)
    assert result.transcript.text == "word0 word1 word2"
    assert pools.contexts == {0: [0], 1: [0], 2: [0]}
    assert counted("trimmed_windows") == 0


@pytest.mark.parametrize(
    ("options", "trims", "early"),
    [
        ({"stream": True}, True, True),
        ({"stream": False}, True, False),
        ({"stream": True}, False, False),
        ({"stream": True, "fallback": False}, True, False),
    ],
)
async def test_short_windows_are_cut_where_they_cost_little_and_somebody_reads_along(
    pools: PlayedPools, options: dict[str, bool], trims: bool, early: bool
) -> None:
    """Where tokens are sent at once, text comes early by itself, and contexts are full."""
    audio = PlayedAudio(1)
    trimmed = TRIMMED if trims else None
    await run(pools, audio, replace(PARAMS, **options), context_for=trimmed)
    assert audio.early is early


async def test_a_dead_encoder_is_replaced(pools: PlayedPools) -> None:
    pools.encode_fault = lambda window, nth: WorkerGoneError("died") if nth == 1 else None
    text = await run(pools)
    assert text == "word0 word1 word2"


async def test_a_full_pool_is_asked_until_it_has_room(pools: PlayedPools) -> None:
    """More often than a failing worker would be."""
    busy = SETTINGS.max_attempts + 2
    pools.decode_fault = lambda window, nth: OverloadedError("full") if nth <= busy else None
    text = await run(pools, 1)
    assert text == "word0"


async def test_a_draining_worker_is_asked_until_there_is_another(pools: PlayedPools) -> None:
    pools.encode_fault = lambda window, nth: WorkerDrainingError("ends") if nth < 30 else None
    assert await run(pools, 1, context=request_of(100.0)) == "word0"


def ends_workers(window: int, nth: int) -> Exception | None:
    return WorkerDiedError("out of memory") if window == 0 else None


async def test_a_window_ends_two_workers_at_most_and_so_does_its_audio(pools: PlayedPools) -> None:
    """All later requests of the same owner with it are refused at once, for a while."""
    clock = virtual_clock()
    audio: Any = PlayedAudio(1)
    parts = (audio, pools, pools, pools.tokenizer, SETTINGS)
    transcriber = RequestTranscriber(*parts, dims=DIMS, clock=clock)

    async def refused(**changes: Any) -> str:
        with pytest.raises(WindowRefusedError) as refusal:
            await transcriber.transcribe(Path("none"), PARAMS, request_of(**changes))
        return refusal.value.message

    pools.decode_fault = ends_workers
    reason = await refused()
    assert "out of memory" in reason
    assert pools.decodes == {0: 2}
    for priority in ("interactive", "bulk"):
        assert await refused(priority=priority) == reason
    assert pools.decodes == {0: 2}, "nobody was asked again"
    await refused(owner=b"another")
    assert pools.decodes == {0: 4}, "nobody is told what others sent"
    pools.decode_fault = lambda window, nth: None
    await clock.sleep(REFUSED_S)
    done = await transcriber.transcribe(Path("none"), PARAMS, request_of())
    assert done.transcript.text == "word0"


async def test_windows_that_were_at_workers_that_died_of_another_are_done(
    pools: PlayedPools,
) -> None:
    """Which of them it was shows when they go one by one: it ends one worker more."""
    last: list[int] = []

    def fault(window: int, nth: int) -> Exception | None:
        if nth >= 3:
            last.append(pools.running)
        return WorkerDiedError("it") if window == 2 or (window < 6 and nth <= 2) else None

    clock = virtual_clock()
    pools.decode_fault = fault
    transcriber = RequestTranscriber(
        PlayedAudio(1),
        pools,
        pools,
        pools.tokenizer,
        SETTINGS,
        dims=DIMS,
        clock=clock,  # type: ignore[arg-type]
    )
    request = RequestRun(request_of())
    sent = (
        transcriber._pipeline.decode(
            request, WindowAudio.of_samples(n, np.full(9, n, np.int16)), DecodeOptions()
        )
        for n in range(8)
    )
    results = await asyncio.gather(*sent, return_exceptions=True)
    failed = [n for n, one in enumerate(results) if isinstance(one, BaseException)]
    assert failed == [2]
    assert isinstance(results[2], WindowRefusedError)
    assert pools.decodes == dict.fromkeys(range(6), 3) | {6: 1, 7: 1}
    assert last == [0] * 6, "one after another"


async def test_workers_that_never_work_are_given_up_as_503(pools: PlayedPools) -> None:
    pools.encode_fault = lambda window, nth: WorkerGoneError("cannot be reached")
    with pytest.raises(OverloadedError) as failure:
        await run(pools, 1)
    assert failure.value.retry_after_s
    assert pools.encodes[0] == SETTINGS.max_attempts


async def test_a_poisoned_window_ends_its_request_as_a_failure(pools: PlayedPools) -> None:
    pools.decode_fault = lambda window, nth: SequenceFailedError("nan") if window == 1 else None
    with pytest.raises(SequenceFailedError):
        await run(pools)


async def test_a_refused_handle_is_never_tried_again(pools: PlayedPools) -> None:
    pools.decode_fault = lambda window, nth: HandleRefusedError("bad signature")
    with pytest.raises(HandleRefusedError):
        await run(pools, 1)
    assert pools.decodes == {0: 1}


async def test_a_handle_of_another_version_is_encoded_again(pools: PlayedPools) -> None:
    """While one version replaces another, a window may meet one of each, and then two alike."""
    pools.decode_fault = lambda window, nth: LayoutMismatchError("pages of 7") if nth < 3 else None
    text = await run(pools, 1)
    assert text == "word0"
    assert pools.encodes == {0: 3}


async def test_the_deadline_ends_everything(pools: PlayedPools) -> None:
    pools.decode_fault = lambda window, nth: OverloadedError("full")
    with pytest.raises(DeadlineExceededError):
        await run(pools, 1, context=request_of(0.3))


def patient_request(**changes: Any) -> RequestContext:
    return RequestContext("r1", None, 600.0, clock=virtual_clock(), **changes)


async def test_a_request_lives_while_its_windows_end(pools: PlayedPools) -> None:
    """However long it takes, though no window may take longer than the limit."""
    pools.delay_s = lambda window: 400.0
    context = patient_request()
    text = await run(pools, 40, context=context)
    assert len(text.split()) == 40
    assert context.clock.monotonic() - context.started_s > 1500.0


async def test_it_ends_when_no_window_does(pools: PlayedPools) -> None:
    pools.delay_s = lambda window: 400.0 if window < 20 else 1e6
    context = patient_request()
    with pytest.raises(DeadlineExceededError, match="no window was finished for 600 s"):
        await run(pools, 40, context=context)
    assert pools.running == 0


async def test_it_lives_while_it_waits_for_others_whose_windows_end(pools: PlayedPools) -> None:
    """A window that a worker kept for too long is sent again then."""
    context = patient_request()
    pools.encode_fault = lambda window, nth: (
        OverloadedError("full") if context.clock.monotonic() < 3000.0 else None
    )
    pools.delay_s = lambda window: 1e6 if pools.encodes[0] == pools.decodes[0] == 2 else 1.0
    waiting = asyncio.create_task(run(pools, 1, context=context))
    for _ in range(50):
        await asyncio.sleep(100.0)
        patient_request(progress=context.progress).window_ended(1.0)
    assert await waiting == "word0"


async def test_the_time_that_a_client_gives_ends_a_request_whose_windows_end(
    pools: PlayedPools,
) -> None:
    pools.delay_s = lambda window: 10.0
    with pytest.raises(DeadlineExceededError, match="within its 45 s"):
        await run(pools, 100, context=patient_request(timeout_s=45.0))


async def test_a_time_that_the_workers_speed_cannot_meet_is_refused_at_once(
    pools: PlayedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the file says how long it is, and windows have been measured."""
    progress, a_file = Progress(pace_s=0.5), patient_request(timeout_s=100.0)
    monkeypatch.setattr(PlayedStream, "expected_s", 4 * 3600.0)
    with pytest.raises(InvalidRequestError, match=r"audio take 240 s .*/v1/batches") as no:
        await run(pools, 4, context=replace(a_file, progress=progress))
    assert (no.value.param, no.value.code) == ("x-splitscribe-timeout", "timeout_too_short")
    assert pools.encodes == {}
    await run(pools, 4, context=replace(a_file, progress=progress, timeout_s=250.0))
    assert 0.0 < progress.pace_s < 0.5, "these took less"
    await run(pools, 4, context=a_file)


async def test_one_failure_cancels_the_other_windows(pools: PlayedPools) -> None:
    pools.decode_fault = lambda window, nth: HandleRefusedError("no") if window == 0 else None
    with pytest.raises(HandleRefusedError):
        await run(pools, 8)
    assert pools.running == 0


async def test_bad_audio_in_the_middle_is_the_requests_error(pools: PlayedPools) -> None:
    with pytest.raises(InvalidAudioError):
        await run(pools, PlayedAudio(2, InvalidAudioError("truncated")))
    assert pools.running == 0


async def test_an_unknown_language_is_settled_by_the_first_speech(pools: PlayedPools) -> None:
    """Windows go one by one until one with speech tells the language; the rest use it."""
    pools.no_speech = lambda window: 0.9 if window == 0 else 0.0
    text = await run(pools, 5, replace(PARAMS, language=None))
    assert text == "word1 word2 word3 word4"
    assert pools.languages == {0: None, 1: None, 2: "de", 3: "de", 4: "de"}


async def test_a_language_is_sought_among_the_allowed_ones(pools: PlayedPools) -> None:
    """One alone need not be sought."""
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


async def test_a_first_try_is_told_as_the_first_whatever_the_others_took(
    pools: PlayedPools, caplog: pytest.LogCaptureFixture
) -> None:
    """Window 1 loses its KV once: its second try is the request's fourth encode."""
    lost = KVLostError("the KV is gone")
    pools.decode_fault = lambda window, nth: lost if window == 1 and nth == 1 else None
    await run(pools)
    assert {one.attempt for one in pools.encoded} == {1, 2, 3, 4}
    for told in (pools.encoded, pools.decoded):
        assert {(one.window, one.tries) for one in told} == {(0, 1), (1, 1), (1, 2), (2, 1)}
    assert "window 1 is tried again after attempt 1" in caplog.text

"""What is tried again, how often, and what is given up; how long a request may live.

The pools are played; the real ones are in the end-to-end tests.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import (
    DeadlineExceededError,
    HandleRefusedError,
    InvalidRequestError,
    KVLostError,
    LayoutMismatchError,
    OverloadedError,
    SequenceFailedError,
    WindowRefusedError,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerError,
    WorkerGoneError,
)
from cluster.common.messages import DecodeOptions, Priority
from cluster.planning.virtual_time import virtual_clock
from router.deadly_audio import REFUSED_S
from router.interface import Progress, RequestContext
from router.pipeline import RequestRun, WindowAudio
from router.pools import EnginePool, Room
from router.transcriber import RequestTranscriber
from tests.support.played_pools import (
    DIMS,
    PARAMS,
    SETTINGS,
    PlayedAudio,
    PlayedPools,
    PlayedStream,
    request_of,
    run,
)

TRIES = SETTINGS.max_attempts
ON_VIRTUAL_TIME = True  # read by this room's conftest.py


@pytest.mark.parametrize(
    ("stage", "error", "times", "calls"),
    [
        ("encode", WorkerGoneError("died"), 1, (2, 1)),
        ("encode", WorkerDrainingError("ends"), 29, (30, 1)),
        ("decode", WorkerGoneError("died"), 1, (1, 2)),  # another decoder reads the same KV
        ("decode", OverloadedError("full"), TRIES + 2, (1, TRIES + 3)),
        ("decode", LayoutMismatchError("pages of 7"), 2, (3, 3)),  # of another version
    ],
)
async def test_what_may_pass_is_tried_again_until_it_has_passed(
    pools: PlayedPools, stage: str, error: Exception, times: int, calls: tuple[int, int]
) -> None:
    """Full and draining workers more often than failing ones. calls: encodes and decodes."""
    setattr(pools, f"{stage}_fault", lambda window, nth: error if nth <= times else None)
    assert await run(pools, 1, context=request_of(100.0)) == "word0"
    assert (pools.encodes[0], pools.decodes[0]) == calls


async def test_what_people_read_counts_the_tries_of_a_window_alone(pools: PlayedPools) -> None:
    pools.encode_fault = lambda window, nth: (
        WorkerGoneError("died") if (window, nth) == (2, 1) else None
    )
    await run(pools, 4, context=request_of(100.0))
    tries = sorted((one.window, one.tries) for one in pools.encoded)
    assert tries == [(0, 1), (1, 1), (2, 1), (2, 2), (3, 1)]
    assert max(one.attempt for one in pools.encoded) == 5


@pytest.mark.parametrize(
    ("stage", "error", "told", "tries"),
    [
        ("encode", WorkerGoneError("cannot be reached"), OverloadedError, TRIES),
        ("decode", SequenceFailedError("nan"), SequenceFailedError, TRIES),
        ("decode", HandleRefusedError("bad signature"), HandleRefusedError, 1),
        ("decode", OverloadedError("full"), DeadlineExceededError, None),
    ],
)
async def test_what_does_not_pass_ends_the_request(
    pools: PlayedPools, stage: str, error: Exception, told: type[Exception], tries: int | None
) -> None:
    setattr(pools, f"{stage}_fault", lambda window, nth: error)
    with pytest.raises(told) as failure:
        await run(pools, 1)
    if isinstance(failure.value, OverloadedError):
        assert failure.value.retry_after_s
    assert tries in (None, getattr(pools, f"{stage}s")[0])


def transcriber_of(encoders: Any, decoders: Any) -> RequestTranscriber:
    audio: Any = PlayedAudio(1)
    tokenizer = (encoders if isinstance(encoders, PlayedPools) else decoders).tokenizer
    parts = (audio, encoders, decoders, tokenizer, SETTINGS)
    return RequestTranscriber(*parts, dims=DIMS, clock=virtual_clock())


@pytest.mark.parametrize("dead", ["encoder", "decoder"])
async def test_an_engine_of_this_process_that_died_ends_what_it_is_asked(
    pools: PlayedPools, dead: str
) -> None:
    """Elsewhere another worker comes in its place, which these windows would wait for."""

    def submit(*_: Any) -> Any:
        raise WorkerDrainingError("the device is lost")

    engine: Any = EnginePool(submit, lambda: None)  # type: ignore[arg-type, return-value]
    both = (engine, pools) if dead == "encoder" else (pools, engine)
    transcriber = transcriber_of(*both)
    with pytest.raises(WorkerError, match="the device is lost") as failure:
        await transcriber.transcribe(Path("none"), PARAMS, request_of(3600.0))
    assert type(failure.value) is WorkerError


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


@pytest.mark.parametrize(
    ("priority", "lost_s", "usual_s", "tries"),
    [
        ("interactive", 300.0, 0.0, 2),
        ("interactive", 300.0, 90.0, 1),  # all of them take their time
        ("bulk", 3000.0, 0.0, 1),  # which may stand still for an hour
        ("bulk", 4000.0, 0.0, 2),
    ],
)
async def test_a_call_that_gets_no_answer_is_sent_again(
    pools: PlayedPools, priority: Priority, lost_s: float, usual_s: float, tries: int
) -> None:
    pools.delay_s = lambda window: lost_s if window == 9 else usual_s
    text = await run(pools, 12, context=request_of(7 * 24 * 3600.0, priority=priority))
    assert len(text.split()) == 12
    assert (pools.decodes[9], pools.cancelled) == (tries, tries - 1)


async def test_a_window_ends_two_workers_at_most_and_so_does_its_audio(pools: PlayedPools) -> None:
    transcriber = transcriber_of(pools, pools)

    async def refused(**changes: Any) -> str:
        with pytest.raises(WindowRefusedError) as refusal:
            await transcriber.transcribe(Path("none"), PARAMS, request_of(**changes))
        return refusal.value.message

    pools.decode_fault = lambda window, nth: WorkerDiedError("out of memory")
    reason = await refused()
    assert "out of memory" in reason
    assert pools.decodes == {0: 2}
    for priority in ("interactive", "bulk"):
        assert await refused(priority=priority) == reason
    assert pools.decodes == {0: 2}, "nobody was asked again"
    await refused(owner=b"another")
    assert pools.decodes == {0: 4}, "nobody is told what others sent"
    pools.decode_fault = lambda window, nth: None
    await transcriber._clock.sleep(REFUSED_S)
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

    pools.decode_fault = fault
    decode, request = transcriber_of(pools, pools)._pipeline.decode, RequestRun(request_of())
    windows = [WindowAudio.of_samples(n, np.full(9, n, np.int16)) for n in range(8)]
    sent = (decode(request, window, DecodeOptions()) for window in windows)
    results = await asyncio.gather(*sent, return_exceptions=True)
    failed = [n for n, one in enumerate(results) if isinstance(one, BaseException)]
    assert failed == [2]
    assert isinstance(results[2], WindowRefusedError)
    assert pools.decodes == dict.fromkeys(range(6), 3) | {6: 1, 7: 1}
    assert last == [0] * 6, "one after another"


def patient_request(**changes: Any) -> RequestContext:
    return RequestContext("r1", None, 600.0, clock=virtual_clock(), **changes)


async def test_a_request_lives_while_its_windows_end(pools: PlayedPools) -> None:
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


async def test_what_waits_for_its_turn_has_all_of_its_time_at_the_workers(
    pools: PlayedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "room", lambda: Room(1, 1.0))
    pools.delay_s = lambda window: 400.0
    await run(pools, 4, context=patient_request())
    assert pools.decodes == dict.fromkeys(range(4), 1)
    assert pools.cancelled == 0


async def test_a_first_call_that_is_lost_is_made_again_before_the_request_stalls(
    pools: PlayedPools,
) -> None:
    pools.delay_s = lambda window: 1e9 if pools.decodes[window] == 1 else 1.0
    await run(pools, 2, context=patient_request())
    assert pools.decodes == {0: 2, 1: 2}


async def test_the_time_that_a_client_gives_ends_a_request_whose_windows_end(
    pools: PlayedPools,
) -> None:
    pools.delay_s = lambda window: 10.0
    with pytest.raises(DeadlineExceededError, match="within its 45 s"):
        await run(pools, 100, context=patient_request(timeout_s=45.0))


async def test_a_time_that_the_workers_speed_cannot_meet_is_refused_at_once(
    pools: PlayedPools, monkeypatch: pytest.MonkeyPatch
) -> None:
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

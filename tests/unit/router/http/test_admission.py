"""Requests come in whole, by the seconds of audio that are pending."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
from dataclasses import dataclass

import pytest

from cluster.common.clock import Clock
from cluster.common.errors import CrowdedError, DeadlineExceededError
from cluster.common.messages import Priority
from router.http.admission import (
    BYTES_PER_AUDIO_S,
    LEAST_SHARE,
    MAX_REQUESTS,
    Admission,
    telling_waits,
)
from router.interface import DeadlineRule, RequestContext, StageTimings, TranscriptionResult
from router.transcript import Transcript
from tests.support.flash_crowd import WINDOW_S, Crowd, Phase


def bytes_of(seconds: float) -> int:
    return int(seconds * BYTES_PER_AUDIO_S)


def test_requests_fit_until_the_limit_and_leave_their_place() -> None:
    admission = Admission(100.0)
    with admission.admit(bytes_of(60)):
        with admission.admit(bytes_of(40)):
            assert admission.pending_audio_s == 100.0
            with pytest.raises(CrowdedError) as caught:
                admission.admit(bytes_of(1))
        with admission.admit(bytes_of(40)):
            assert admission.requests == 2
    assert (admission.pending_audio_s, admission.requests) == (0.0, 0)
    assert caught.value.retry_after_s is not None
    assert pickle.loads(pickle.dumps(caught.value)).retry_after_s == caught.value.retry_after_s


def test_no_more_requests_than_a_router_can_hold() -> None:
    """However short each is."""
    admission = Admission(1e9)
    held = [admission.admit(0) for _ in range(MAX_REQUESTS)]
    with pytest.raises(CrowdedError):
        admission.admit(0)
    held[0].expect(5.0)  # who is in stays in
    held[0].__exit__(None, None, None)
    with admission.admit(0):
        assert admission.requests == MAX_REQUESTS


def test_a_request_that_is_alone_always_fits() -> None:
    admission = Admission(10.0)
    with admission.admit(bytes_of(500)) as share:
        share.expect(900.0)
        assert admission.pending_audio_s == 900.0


def test_the_true_length_may_refuse_before_work_began() -> None:
    admission = Admission(100.0)
    with admission.admit(bytes_of(50)), admission.admit(bytes_of(10)) as share:
        with pytest.raises(CrowdedError):
            share.expect(51.0)
        share.expect(50.0)
        assert admission.pending_audio_s == 100.0


def test_audio_found_later_counts_and_never_refuses() -> None:
    admission = Admission(100.0)
    with admission.admit(bytes_of(50)), admission.admit(bytes_of(10)) as share:
        share.found(5.0)
        assert admission.pending_audio_s == 60.0
        share.found(500.0)
        assert admission.pending_audio_s == 550.0
        with pytest.raises(CrowdedError):
            admission.admit(1)
    assert admission.pending_audio_s == 0.0


def test_what_has_left_no_longer_counts() -> None:
    admission = Admission(100.0)
    with admission.admit(bytes_of(10)) as share:
        pass
    share.found(50.0)
    share.__exit__(None, None, None)
    assert (admission.pending_audio_s, admission.requests) == (0.0, 0)


def test_a_failure_leaves_too() -> None:
    admission = Admission(100.0)
    with pytest.raises(RuntimeError), admission.admit(bytes_of(10)):
        raise RuntimeError
    assert admission.requests == 0


@pytest.mark.parametrize(
    ("audio_s", "deadline_s"), [(5.0, 120.0), (200.0, 300.0), (10_000.0, 600.0)]
)
def test_the_deadline_follows_the_audio(audio_s: float, deadline_s: float) -> None:
    with Admission(1e6).admit(0) as share:
        context = RequestContext("r", share, DeadlineRule(120.0, 1.5, 600.0))
        assert context.deadline_s == 120.0
        context.expect_audio(audio_s)
        assert context.deadline_s == deadline_s
        assert deadline_s - 5.0 < context.remaining_s() <= deadline_s
        assert share.audio_s == audio_s
        context.found_audio(audio_s / 2)
        assert context.audio_s == audio_s


@dataclass
class Timed:
    """An admission whose time a test passes."""

    max_pending_s: float
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.admission = Admission(self.max_pending_s, lambda: self.now_s)

    @property
    def limit_s(self) -> float:
        return self.admission.limit_audio_s

    def request_waits(self, share: float, seconds: float = 1.0) -> None:
        """One request comes alone, and waits for this share of its deadline."""
        with self.admission.admit(bytes_of(seconds)) as request:
            request.waited(share)


def test_what_requests_waited_for_says_how_much_may_be_pending() -> None:
    timed = Timed(4000.0)
    admission = timed.admission
    held = [admission.admit(bytes_of(10)) for _ in range(100)]
    held[99].waited(0.8)  # with 1000 s pending: twice as long as it may
    assert admission.limit_audio_s == pytest.approx(500.0)
    held[49].waited(0.4)  # with 500 s pending: just as long, which says the same
    held[98].waited(0.792)
    assert admission.limit_audio_s == pytest.approx(500.0)
    with pytest.raises(CrowdedError):
        admission.admit(1)
    for share in held:
        share.__exit__(None, None, None)
    timed.now_s += 60.0
    assert admission.limit_audio_s == 4000.0


def test_one_that_was_not_done_in_time_does_not_close_the_door() -> None:
    """It may have been alone, and long, or have waited for a pool that had to start."""
    timed = Timed(28_800.0)
    for _ in range(20):
        timed.request_waits(1.0)
    assert timed.limit_s == pytest.approx(LEAST_SHARE * 28_800.0)
    with timed.admission.admit(bytes_of(1200)), timed.admission.admit(bytes_of(1200)):
        assert timed.admission.requests == 2


def test_the_door_is_open_again_within_a_minute_whether_or_not_requests_come() -> None:
    for n_quick in (0, 1, 1000):
        timed = Timed(28_800.0)
        timed.request_waits(1.0)
        seen = [timed.limit_s]
        for _ in range(6):
            timed.now_s += 10.0
            for _ in range(n_quick):
                timed.request_waits(0.01)
            seen.append(timed.limit_s)
        assert seen == sorted(seen)
        assert seen[0] == pytest.approx(2_880.0)
        assert seen[3] < 10_000.0, "not all of a crowd at once"
        assert seen[6] == 28_800.0
        timed.now_s += 1e9
        assert timed.limit_s == 28_800.0


@pytest.mark.parametrize("share", [1.0, 0.41, 0.3])
def test_while_requests_wait_long_the_limit_stays(share: float) -> None:
    """Also where it is just as long as they may."""
    timed = Timed(28_800.0)
    timed.request_waits(1.0)
    for _ in range(100):
        timed.now_s += 5.0
        assert timed.limit_s == pytest.approx(2_880.0)
        timed.request_waits(share, 2_000.0)


async def test_a_request_tells_what_it_waited_for_others() -> None:
    """Not what its own work took: a slow machine is no crowd."""
    admission, now_s = Admission(10_000.0), [0.0]
    clock = Clock(lambda: now_s[0], asyncio.sleep, random.Random(0))
    shares: list[float] = []

    async def work(took_s: float, timings: StageTimings) -> TranscriptionResult:
        now_s[0] += took_s
        if took_s > 120.0:
            raise DeadlineExceededError("too late")
        return TranscriptionResult(Transcript("transcribe", "en", 5.0, "", ()), timings)

    for took_s, work_s in ((100.0, 90.0), (100.0, 10.0), (130.0, 0.0), (10.0, 50.0)):
        with admission.admit(0) as share:
            share.waited = shares.append  # type: ignore[method-assign]
            context = RequestContext("r", share, DeadlineRule(120.0, 0.0, 120.0), clock)
            timings = StageTimings(encode_s=work_s / 2, decode_s=work_s / 2)
            with contextlib.suppress(DeadlineExceededError):
                await telling_waits(share, context, work(took_s, timings))
    assert shares == pytest.approx([10 / 120, 90 / 120, 1.0, 0.0])


QUIET: dict[Priority, float] = {"interactive": 7.0, "live": 1.0, "bulk": 0.5}
CROWD: dict[Priority, float] = {"interactive": 70.0, "live": 1.0, "bulk": 0.5}
CAPACITY = 1 / WINDOW_S  # windows a second


@pytest.mark.parametrize("max_pending_s", [600.0, pytest.param(28_800.0, marks=pytest.mark.slow)])
def test_a_crowd_of_ten_times_the_load_is_shed_in_the_order_of_priority(
    max_pending_s: float,
) -> None:
    """Live speech goes first and loses nothing; who is let in is done in time; bulk keeps its turn.

    By default more may be pending than can be done in time: that is found out by what requests
    wait for, a deadline after the crowd came.
    """
    crowd = Crowd(max_pending_s).run(Phase(30, QUIET), Phase(400, CROWD))
    settled = (220, 390)
    done = {one: crowd.rate(crowd.done, one, *settled) for one in CROWD}
    assert sum(done.values()) > 0.9 * CAPACITY
    assert done["live"] == pytest.approx(crowd.rate(crowd.came, "live", *settled), rel=0.1)
    assert crowd.refused.total() == crowd.rate(crowd.refused, "interactive", 0, 400) * 400
    assert crowd.rate(crowd.refused, "interactive", *settled) > 0.8 * CROWD["interactive"]
    assert done["bulk"] > 0.5 * CROWD["bulk"]
    assert max(crowd.waits_s["live"]) < 3.0
    assert sum(crowd.done.values()) > 0.85 * CAPACITY * 400, "with what was lost until it settled"


@pytest.mark.slow
def test_after_a_crowd_everybody_comes_in_again() -> None:
    crowd = Crowd(28_800.0).run(Phase(30, QUIET), Phase(200, CROWD), Phase(420, QUIET))
    assert crowd.rate(crowd.refused, "interactive", 330, 420) == 0.0
    assert crowd.rate(crowd.done, "interactive", 330, 420) > 0.9 * QUIET["interactive"]

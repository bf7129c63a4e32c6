"""Requests come in whole, by the seconds of audio that are pending."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import pytest

from cluster.common.errors import CrowdedError
from router.http.admission import (
    BYTES_PER_AUDIO_S,
    LEAST_SHARE,
    MAX_REQUESTS,
    MOST_WAIT_S,
    N_WAITS,
    Admission,
    AdmittedRequest,
)
from router.interface import RequestContext, StageTimings


def bytes_of(seconds: float) -> int:
    return int(seconds * BYTES_PER_AUDIO_S)


def admitted(admission: Admission, seconds: float) -> AdmittedRequest:
    """A request whose upload has arrived."""
    share = admission.admit(bytes_of(seconds))
    share.expect(seconds)
    return share


def test_requests_fit_until_the_limit_and_leave_their_place() -> None:
    admission = Admission(100.0)
    with admitted(admission, 60.0):
        with admitted(admission, 40.0):
            assert admission.pending_audio_s == 100.0
            with pytest.raises(CrowdedError) as caught:
                admission.admit(bytes_of(1))
        with admitted(admission, 40.0):
            assert admission.requests == 2
    assert (admission.pending_audio_s, admission.requests) == (0.0, 0)
    assert caught.value.retry_after_s is not None
    assert pickle.loads(pickle.dumps(caught.value)).retry_after_s == caught.value.retry_after_s


def test_slow_uploads_count_with_what_has_arrived() -> None:
    admission = Admission(28_800.0)
    uploads = [admission.admit(25_000_000) for _ in range(17)]
    for upload in uploads:
        upload.received(16_000)
    assert admission.pending_audio_s == 17.0
    admission.admit(25_000_000)
    for upload in uploads:
        upload.received(25_000_000 - 16_000)
    with pytest.raises(CrowdedError):
        admission.admit(36_000_000)
    uploads[0].expect(10.0)  # what the file holds, once it is opened
    assert admission.pending_audio_s == 16 * 25_000_000 / BYTES_PER_AUDIO_S + 10.0


def test_no_more_requests_than_a_router_can_hold() -> None:
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
    with admitted(admission, 50.0), admitted(admission, 10.0) as share:
        with pytest.raises(CrowdedError):
            share.expect(51.0)
        share.expect(50.0)
        assert admission.pending_audio_s == 100.0


def test_audio_found_later_counts_and_never_refuses() -> None:
    admission = Admission(100.0)
    with admitted(admission, 50.0), admitted(admission, 10.0) as share:
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


def test_a_request_counts_with_the_audio_that_it_finds() -> None:
    with Admission(1e6).admit(0) as share:
        context = RequestContext("r", share)
        context.expect_audio(200.0)
        context.found_audio(100.0)
        assert context.audio_s == share.audio_s == 200.0


@dataclass
class Timed:
    """An admission whose time a test passes."""

    max_pending_s: float = 28_800.0
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.admission = Admission(self.max_pending_s, lambda: self.now_s)

    @property
    def limit_s(self) -> float:
        return self.admission.limit_audio_s

    def request_waited(self, wait_s: float, seconds: float = 5.0, failures: int = 0) -> None:
        """One that came alone is done; its first window waited so long in queues."""
        with admitted(self.admission, seconds) as share:
            share.done(StageTimings(first_queue_s=wait_s, windows=1, attempts=2, failures=failures))

    def crowd_waited(self) -> None:
        for _ in range(N_WAITS):
            self.request_waited(600.0)


def test_what_requests_waited_for_says_how_much_may_be_pending() -> None:
    timed = Timed(1400.0)
    shares = [admitted(timed.admission, 10.0) for _ in range(100)]
    for number in range(100 - N_WAITS, 100):
        there_s = 10.0 * (number + 1)
        shares[number].done(StageTimings(first_queue_s=there_s / 12, windows=1, attempts=1))
    assert timed.limit_s == pytest.approx(MOST_WAIT_S * 12)
    for share in shares[50:90]:  # what came before them says the same
        share.done(StageTimings(first_queue_s=share._pending_s / 12, windows=1, attempts=1))
    assert timed.limit_s == pytest.approx(MOST_WAIT_S * 12)
    with pytest.raises(CrowdedError):
        timed.admission.admit(1)
    for share in shares:
        share.__exit__(None, None, None)
    timed.now_s += 60.0
    assert timed.limit_s == 1400.0


def test_one_long_wait_says_nothing() -> None:
    """A pool may have had to wake from zero, or a worker was frozen."""
    timed = Timed()
    timed.request_waited(60.0)
    timed.request_waited(600.0)
    for _ in range(100):
        timed.request_waited(600.0, failures=1)
    assert timed.limit_s == 28_800.0
    with admitted(timed.admission, 90.0), admitted(timed.admission, 90.0):
        assert timed.admission.requests == 2


def test_eight_requests_that_a_slow_machine_takes_one_by_one_do_not_close_it() -> None:
    """25 s of audio each in large-v3's shape on two cores."""
    timed = Timed()
    for _ in range(5):
        shares = [admitted(timed.admission, 25.0) for _ in range(8)]
        for number, share in enumerate(shares):
            timed.now_s += 45.0
            share.done(StageTimings(first_queue_s=45.0 * number, windows=1, attempts=1))
            share.__exit__(None, None, None)
        assert timed.limit_s >= LEAST_SHARE * 28_800.0


def test_the_limit_falls_by_half_at_most_and_not_below_its_share() -> None:
    timed, seen = Timed(), []
    for _ in range(5):
        timed.crowd_waited()
        seen.append(timed.limit_s)
    assert seen == pytest.approx([14_400.0, 7_200.0, 3_600.0, 2_880.0, 2_880.0])
    with admitted(timed.admission, 1200.0), admitted(timed.admission, 1200.0):
        assert timed.admission.requests == 2


def test_the_door_is_open_again_within_a_minute_whether_or_not_requests_come() -> None:
    for n_quick in (0, 1, 1000):
        timed = Timed()
        for _ in range(5):
            timed.crowd_waited()
        seen = [timed.limit_s]
        for _ in range(6):
            timed.now_s += 10.0
            for _ in range(n_quick):
                timed.request_waited(0.1)
            seen.append(timed.limit_s)
        assert seen == sorted(seen)
        assert seen[3] < 15_000.0, "not all of a crowd at once"
        assert seen[6] == 28_800.0
        timed.now_s += 1e9
        assert timed.limit_s == 28_800.0


@pytest.mark.parametrize("wait_s", [500.0, 61.0, 40.0])
def test_while_requests_wait_long_the_limit_does_not_grow(wait_s: float) -> None:
    timed = Timed()
    for _ in range(5):
        timed.crowd_waited()
    for _ in range(100):
        timed.now_s += 5.0
        timed.request_waited(wait_s, 5_000.0)
    assert timed.limit_s == pytest.approx(2_880.0)

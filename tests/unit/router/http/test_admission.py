"""Requests come in whole, by the seconds of audio that are pending."""

from __future__ import annotations

import pickle

import pytest

from cluster.errors import OverloadedError
from router.http.admission import BYTES_PER_AUDIO_S, MAX_REQUESTS, Admission
from router.interface import DeadlineRule, RequestContext


def bytes_of(seconds: float) -> int:
    return int(seconds * BYTES_PER_AUDIO_S)


def test_requests_fit_until_the_limit_and_leave_their_place() -> None:
    admission = Admission(100.0)
    with admission.admit(bytes_of(60)):
        with admission.admit(bytes_of(40)):
            assert admission.pending_audio_s == 100.0
            with pytest.raises(OverloadedError) as caught:
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
    with pytest.raises(OverloadedError):
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
        with pytest.raises(OverloadedError):
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
        with pytest.raises(OverloadedError):
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

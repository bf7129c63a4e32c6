"""Which class goes next: the most urgent, and every one at last."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from cluster.common import priorities
from cluster.common.messages import Priority
from cluster.common.priorities import PASSED_BY, SHARES, URGENCY, Turns, leaves_room

ALL: list[Priority] = ["bulk", "live", "later", "interactive"]


def test_the_most_urgent_goes_first() -> None:
    turns = Turns()
    assert list(URGENCY) == ["live", "interactive", "later", "bulk"]
    assert turns.next(ALL) == "live"
    assert turns.next(["bulk", "interactive"]) == "interactive"
    assert turns.next(["bulk"]) == "bulk"


def test_a_class_that_was_passed_by_often_enough_is_next() -> None:
    turns = Turns()
    for _ in range(PASSED_BY["interactive"]):
        assert turns.next(ALL) == "live"
        turns.went("live", ALL)
    assert turns.next(ALL) == "interactive"
    turns.went("interactive", ALL)
    assert turns.next(ALL) == "later"
    turns.went("later", ALL)
    assert turns.next(ALL) == "live"


def test_who_waits_no_more_keeps_no_claim() -> None:
    turns = Turns()
    for _ in range(PASSED_BY["bulk"]):
        turns.went("live", ["bulk"])
    assert turns.is_due("bulk")
    turns.went("live", ["interactive"])
    assert not turns.is_due("bulk")


def test_bulk_leaves_half_of_the_room_and_later_windows_an_eighth() -> None:
    assert leaves_room(0, 5, 8, SHARES["bulk"]), "one may always begin"
    assert leaves_room(3, 1, 8, SHARES["bulk"])
    assert not leaves_room(4, 1, 8, SHARES["bulk"])
    assert leaves_room(6, 1, 8, SHARES["later"])
    assert not leaves_room(7, 1, 8, SHARES["later"])


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux")
def test_a_thread_lets_the_encoder_go_first_and_no_other_thread_does() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found: list[int] = []

    def decode() -> None:
        priorities.let_encoder_go_first()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=decode)
    thread.start()
    thread.join()
    assert found == [min(19, before + priorities.BEHIND_ENCODER)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before

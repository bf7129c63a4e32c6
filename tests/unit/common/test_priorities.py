"""Claims of classes that were passed by, room for one, and threads that let others go first."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from cluster.common import priorities
from cluster.common.priorities import PASSED_BY, SHARES, Turns, leaves_room


def test_who_waits_no_more_keeps_no_claim() -> None:
    turns = Turns()
    for _ in range(PASSED_BY["bulk"]):
        turns.went("live", ["bulk"])
    assert turns.is_due("bulk")
    turns.went("live", ["interactive"])
    assert not turns.is_due("bulk")


def test_one_may_always_begin_where_nothing_is_used() -> None:
    assert leaves_room(0, 5, 8, SHARES["bulk"])


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

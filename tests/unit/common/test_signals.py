"""What processes tell of what waits in them, and for how long it counts."""

from __future__ import annotations

import numpy as np

from cluster.common.messages import EncodeRequest, Priority
from cluster.common.signals import HEARD_S, Backlogs


def request(sender: str, backlog: float, priority: Priority = "interactive") -> EncodeRequest:
    pcm = np.zeros(1, np.int16)
    return EncodeRequest("r", 0, 1, pcm, 30.0, priority=priority, sender=sender, backlog=backlog)


def test_the_last_word_of_each_process_counts_for_a_while() -> None:
    now_s = [100.0]
    backlogs = Backlogs(lambda: now_s[0])
    backlogs.hear(request("a", 9.0))
    backlogs.hear(request("a", 4.0))
    backlogs.hear(request("b", 3.0))
    backlogs.hear(request("archive", 61.0, "bulk"))
    assert (backlogs.total(bulk=False), backlogs.total(bulk=True)) == (7.0, 61.0)
    now_s[0] += HEARD_S
    backlogs.hear(request("b", 2.0))
    assert (backlogs.total(bulk=False), backlogs.total(bulk=True)) == (2.0, 0.0)

"""How far updates are apart, by how long the last ones took."""

from __future__ import annotations

import pytest

from cluster.common.clock import Clock
from cluster.planning.virtual_time import run_virtually, virtual_clock
from router.live.schedule import FRESH_S, Pace


def test_the_first_answer_after_a_pause_stands_for_itself() -> None:
    """Else answers that are far apart would count for a tenth of their time, and never as load."""

    async def run() -> None:
        clock: Clock = virtual_clock()
        pace = Pace(0.5, 3.0, clock)
        for _ in range(3):
            pace.record(6.0)
            assert pace.update_s == pytest.approx(6.0)
            assert pace.is_overloaded
            await clock.sleep(FRESH_S + 1.0)
            assert pace.update_s == 0.0

    run_virtually(run())

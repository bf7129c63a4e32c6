"""How many realtime sessions there are, and which were refused, is in the router's metrics."""

from __future__ import annotations

import pytest
from websockets.exceptions import InvalidStatus

from cluster.common.metrics import ROUTER_METRICS
from cluster.common.settings import LiveSettings
from tests.support.live.realtime_door import opened, until
from tests.support.router_fakes import make_settings
from tests.support.workers.counted import Counted


async def test_open_and_refused_sessions_are_counted() -> None:
    counted = Counted(ROUTER_METRICS)
    settings = make_settings(live=LiveSettings(max_sessions=1))
    async with opened(settings, recorder=counted.recorder) as door:
        realtime = door.app.state.realtime
        async with door.connect() as socket:
            await until(socket, "session.created")
            realtime.report()
            assert counted.of("splitscribe_live_sessions")[-1] == 1
            with pytest.raises(InvalidStatus):
                async with door.connect():
                    pass
        await door.none_left()
        with pytest.raises(InvalidStatus):
            async with door.connect("?intent=conversation"):
                pass
        realtime.report()
    assert counted.of("splitscribe_live_sessions")[-1] == 0
    refused = counted.of("splitscribe_live_refused_total", code="rate_limit_exceeded")
    assert refused == [1.0], "a wrong intent is no want of room"

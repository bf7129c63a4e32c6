"""A router's own listener with a fake engine behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.live.realtime_door import Door, opened


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    async with opened() as made:
        yield made

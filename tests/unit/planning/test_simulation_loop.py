"""`SimulationLoop` runs what asyncio's own loop runs, in the same order and at the same times.

What is due at the very same time it runs in the order in which it was asked for; asyncio promises
no order.
"""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from random import Random

import pytest

from cluster.planning.simulation.virtual_time import (
    STANDS_STILL,
    SimulationLoop,
    VirtualTimeLoop,
    run_virtually,
)

NAME: ContextVar[str] = ContextVar("NAME", default="nobody")
Event = tuple[float, str, str]


async def played(seed: int) -> list[Event]:
    """Tasks that sleep, time out, are cancelled, wake each other and leave callbacks behind."""
    chance, loop = Random(seed), asyncio.get_running_loop()
    told: list[Event] = []

    def tell(what: str) -> None:
        told.append((round(loop.time(), 6), NAME.get(), what))

    async def one(name: str, gate: asyncio.Event) -> None:
        NAME.set(name)
        for _ in range(5):
            try:
                async with asyncio.timeout(chance.uniform(0.1, 2.0)):
                    await asyncio.sleep(chance.choice([0.0, chance.uniform(0.0, 1.0)]))
                    tell("slept")
            except TimeoutError:
                tell("timed out")
            loop.call_soon(tell, "soon")
            loop.call_later(chance.uniform(0.1, 0.3), tell, "later")
            loop.call_later(0.2, tell, "never").cancel()
            loop.call_soon(tell, "never").cancel()
        gate.set()

    gates = [asyncio.Event() for _ in range(20)]
    tasks = [asyncio.create_task(one(f"task {n}", gate)) for n, gate in enumerate(gates)]
    tasks[3].cancel()
    await asyncio.wait([asyncio.create_task(gate.wait()) for gate in gates], timeout=4.0)
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1.0)
    return told


@pytest.mark.parametrize("seed", range(3))
def test_it_runs_the_same_as_asyncios_loop(seed: int) -> None:
    told = run_virtually(played(seed), SimulationLoop)
    assert told == run_virtually(played(seed), VirtualTimeLoop)
    assert {what for _, _, what in told} == {"slept", "timed out", "soon", "later"}


def test_waiting_for_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=STANDS_STILL):
        run_virtually(asyncio.Event().wait(), SimulationLoop)

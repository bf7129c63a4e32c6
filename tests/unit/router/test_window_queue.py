"""Windows that wait in a router: who goes, when there is room, and what others are told of it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

import pytest

from cluster.common.clock import SYSTEM_CLOCK
from cluster.common.fair_order import place_of
from cluster.common.messages import Priority
from router.pools import Room
from router.window_queue import Turn, WindowQueue


@dataclass
class Pool:
    each: float = math.inf
    workers: int = 1
    kept: set[bytes] = field(default_factory=set)

    def room(self) -> Room:
        return Room(self.workers, self.each)

    def has(self, kv_key: bytes) -> bool:
        return kv_key in self.kept


class Router:
    """Windows on their way: each at an encoder until `encoded`, and at a decoder until `done`."""

    def __init__(self, encoders: Pool, decoders: Pool | None = None) -> None:
        self.queue = WindowQueue(encoders, decoders or Pool(), SYSTEM_CLOCK)  # type: ignore[arg-type]
        self.went: list[str] = []
        self._turns: dict[str, tuple[Turn, asyncio.Event, asyncio.Task[None]]] = {}

    async def send(
        self,
        request: str,
        window: int = 0,
        *,
        priority: Priority = "interactive",
        owner: bytes = b"",
        kv_key: bytes = b"",
    ) -> str:
        priority, rank = place_of(window, priority, 0.0)
        turn = Turn(priority, owner, rank, 1.0, 1.0, kv_key)
        name, is_done = f"{request}{window}", asyncio.Event()
        task = asyncio.create_task(self._go(name, turn, is_done))
        self._turns[name] = (turn, is_done, task)
        await asyncio.sleep(0)
        return name

    async def _go(self, name: str, turn: Turn, is_done: asyncio.Event) -> None:
        with self.queue.holding(turn):
            await self.queue.wait(turn, 60.0)
            self.went.append(name)
            await is_done.wait()

    async def encoded(self, name: str) -> None:
        self.queue.encoded(self._turns[name][0])
        await asyncio.sleep(0)

    async def done(self, name: str) -> None:
        self._turns[name][1].set()
        await self._turns[name][2]
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._turns[name][2].cancel()
        await asyncio.wait([self._turns[name][2]])
        await asyncio.sleep(0)


async def test_live_windows_and_kept_kv_wait_for_nobody() -> None:
    encoders = Pool(each=1.0)
    router = Router(encoders)
    for n in range(3):
        await router.send(f"file{n}-")
    await router.send("live", 500, priority="live")
    encoders.kept.add(b"k")
    await router.send("again", kv_key=b"k")
    assert router.went == ["file0-0", "live500", "again0"]


async def test_the_same_audio_waits_for_one_encode() -> None:
    router = Router(Pool(each=1.0))
    first = await router.send("a")
    await router.send("b", kv_key=b"k")
    await router.send("c")
    await router.send("d", kv_key=b"k")
    await router.encoded(first)
    assert router.went == ["a0", "b0", "d0"]


async def test_where_no_worker_is_known_one_window_is_sent() -> None:
    encoders = Pool(each=8.0, workers=0)
    router = Router(encoders)
    for n in range(3):
        await router.send(f"clip{n}-")
    assert router.went == ["clip0-0"]
    assert router.queue.backlog("encoder", "interactive") == 2
    encoders.workers = 2
    assert router.queue.backlog("encoder", "interactive") == 1  # for each of them
    await router.encoded("clip0-0")
    assert len(router.went) == 3


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_who_gives_up_leaves_its_place(is_waiting: bool) -> None:
    router = Router(Pool(each=1.0), Pool(each=1.0))
    for name in ("a", "b", "c"):
        await router.send(name)
    await router.cancel("b0" if is_waiting else "a0")
    if is_waiting:
        await router.done("a0")
    assert router.went == (["a0", "c0"] if is_waiting else ["a0", "b0"])
    assert router.queue.backlog("encoder", "interactive") == (0 if is_waiting else 1)

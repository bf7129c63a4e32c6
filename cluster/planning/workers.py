"""Simulated workers: the real engines over simulated devices, and the transfer of KV."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.handles import release_message, renewal_messages
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import FetchStats, TransferConfig
from cluster.common.messages import CrossKVHandle
from cluster.common.metrics import ENCODER_METRICS, silent_recorder
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.encoder_context import UNTUNED_MAX_CONTENT_S, UNTUNED_SLACK
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import BUNDLED_MODEL, Settings
from cluster.common.signals import DecoderSignals, EncoderSignals
from cluster.planning.devices import Device, Links, WaitingForward, WaitingRunner, WorkerClock
from cluster.planning.profile import LinkProfile, Profile
from cluster.planning.scenario import Outcome, Scenario
from cluster.planning.virtual_time import virtual_clock
from cluster.serve.replicas.replica_setup import BusyShare
from decoder_worker.build import EngineParts
from decoder_worker.engine import DecoderCore
from decoder_worker.prompts import PromptBuilder
from decoder_worker.scheduling.scheduler import ALONE, TOGETHER, Scheduler
from encoder_worker.batcher import Batcher
from encoder_worker.core import EncoderCore
from encoder_worker.loop import IDLE_WAIT_S, EncodeLoop
from encoder_worker.publisher import Publisher

LINK_LATENCY_S = 20e-6  # of a READ between nodes, if the scenario gives the links' rate


class Cell:
    """The state that workers and routers of one cell share. exporters: encoders by agent."""

    def __init__(self, scenario: Scenario, profile: Profile, chance: Random) -> None:
        between = profile.handoff
        if scenario.link_gbit_per_s is not None:
            rate = scenario.link_gbit_per_s * 1e9 / 8
            between = LinkProfile(transport="link", latency_s=LINK_LATENCY_S, bytes_per_s=rate)
        bundled = open_checkpoint(BUNDLED_MODEL, weights=False)
        self.profile, self.random, self.clock = profile, chance, virtual_clock(chance)
        self.loop = asyncio.get_running_loop()
        self.settings = _resolved(scenario.settings, profile)
        self.links = Links(profile.handoff, between)
        self.tokenizer = WhisperTokenizer.from_checkpoint(bundled)
        self.checkpoint = replace(bundled, dims=replace(bundled.dims, **profile.shape.model_dump()))
        self.exporters: dict[str, Any] = {}
        self.outcome = Outcome(scenario, profile)


def _resolved(settings: Settings, profile: Profile) -> Settings:
    """Resolve every `auto` by the profile.

    The context of windows is set too, as the bundled checkpoint's own limits hold for no other.
    """
    asked, slack, longest_s = settings.encoder, UNTUNED_SLACK, UNTUNED_MAX_CONTENT_S
    context = {
        "context": "full" if asked.context == "auto" else asked.context,
        "context_slack": slack if asked.context_slack is None else asked.context_slack,
        "context_max_s": longest_s if asked.context_max_s is None else asked.context_max_s,
    }
    if profile.model == BUNDLED_MODEL:
        context = {}
    resolved = {}
    for role, size in (("encoder", "export_windows"), ("decoder", "kv_windows")):
        own, of_device = getattr(settings, role), getattr(profile, role)
        sizes = {one: getattr(own, one) or getattr(of_device, one) for one in ("max_batch", size)}
        resolved[role] = own.model_copy(update=sizes | (context if role == "encoder" else {}))
    return settings.model_copy(update=resolved)


class _Worker(ABC):
    core: Any
    pool: PagePool

    def __init__(self, node: str, cell: Cell, device: Device) -> None:
        self.node = node
        self.device = device
        self.clock = WorkerClock(cell.loop.time)
        self._hop_s = cell.profile.router.hop_s
        self._woken = asyncio.Event()
        self._loop = cell.loop
        self._turns = cell.loop.create_task(self._take_turns())

    @abstractmethod
    def turn(self) -> float | None:
        """Run a step of the engine. Returns seconds until the next one; None: when it is woken."""

    def is_idle(self) -> bool:
        return not (self.core.load().work or self.pool.n_used)

    async def call(self, request: Any) -> Any:
        await asyncio.sleep(self._hop_s)
        submitted: Future[Any] = self.core.submit(request)
        answered: asyncio.Future[None] = self._loop.create_future()
        submitted.add_done_callback(lambda _: self._loop.call_at(self.clock.now(), _tell, answered))
        self.wake()
        try:
            await answered
        except asyncio.CancelledError:
            submitted.cancel()  # KV that is already published is freed when its lease expires
            self.wake()
            raise
        return submitted.result()

    def wake(self) -> None:
        self._woken.set()

    async def _take_turns(self) -> None:
        while True:
            self._woken.clear()
            wait_s = self.turn()
            await asyncio.sleep(self.clock.now() - self._loop.time())
            if wait_s != 0.0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._woken.wait()


def _tell(answered: asyncio.Future[None]) -> None:
    if not answered.done():
        answered.set_result(None)


class SimEncoder(_Worker):
    core: EncoderCore

    def __init__(self, name: str, node: str, cell: Cell, device: Device) -> None:
        super().__init__(node, cell, device)
        profile, settings, now = cell.profile, cell.settings.encoder, self.clock.now
        layout = profile.kv_layout()
        # Pages have addresses but no memory.
        config = TransferConfig(
            b"simulated", name, device="meta", clock=now, randbits=cell.random.getrandbits
        )
        # Readers call the exporter directly, so its wire does nothing and no thread runs it.
        wire: Any = SimpleNamespace(
            agent=name, transport="simulated", metadata=b"", open=lambda *_: None
        )
        n_pages = settings.export_windows * layout.pages_per_window
        self._exporter = KVExporter(layout, n_pages, config, wire, _without_thread)
        self.pool = self._exporter.pool
        most, wait_s = settings.max_batch, settings.batch_wait_ms / 1000
        self._batcher = Batcher(most, wait_s, clock=now)
        forward: Any = WaitingForward(profile, device, self.clock)
        dtype, recorder = profile.kv_dtype, silent_recorder(ENCODER_METRICS)
        publisher = Publisher(self._exporter, recorder, now, dtype, reuses=settings.cache)
        self._lane = EncodeLoop(self._batcher, publisher, forward, most, blocks=False)
        self.core = EncoderCore(publisher, (self._lane,), profile.shape.n_audio_ctx)
        self._busy, self._bulk_busy = BusyShare(clock=now), BusyShare(clock=now)
        cell.exporters[name] = self

    def turn(self) -> float | None:
        if not self._lane.has_launched:
            self._lane.begin()
        if self._lane.has_launched:
            self._lane.go_on()
            return 0.0
        ready_s = self._batcher.ready_in_s()  # also records that the queue is empty
        return min(ready_s or IDLE_WAIT_S, IDLE_WAIT_S) if len(self._batcher) else None

    def on_notification(self, message: bytes) -> None:
        self._exporter.handle_notifications([message])
        self.wake()  # pages may be free now

    def look_after_leases(self) -> None:
        self._exporter.expire()
        self.wake()

    def signals(self) -> EncoderSignals:
        stats = self.core.stats()
        busy = self._busy.share(stats.encode_s - stats.bulk_s)
        return stats.signals(busy, self._bulk_busy.share(stats.bulk_s))


def _without_thread(_owner: str, start: Callable[[], None], *_: Any) -> Any:
    """Replaces `WireThread`: calls `start`, and runs nothing."""
    start()
    return SimpleNamespace(failure=None)


class SimDecoder(_Worker):
    core: DecoderCore

    def __init__(self, name: str, node: str, cell: Cell, device: Device) -> None:
        super().__init__(node, cell, device)
        profile, settings, now = cell.profile, cell.settings.decoder, self.clock.now
        layout, n_text = profile.kv_layout(), profile.shape.n_text_ctx
        self.pool = _pool(layout, settings.kv_windows)
        self_pool = _pool(
            replace(layout, n_frames=n_text, page_frames=n_text), settings.max_batch + 1
        )
        self._importer = SimImporter(self.pool, cell, node, now)
        importer: Any = self._importer
        ahead = profile.decoder.steps_ahead
        order = TOGETHER if ahead else ALONE  # as on a GPU, or on a CPU
        scheduler = Scheduler(self.pool, self_pool, 1, settings.max_batch, step_order=order)
        runner: Any = WaitingRunner(profile, cell.tokenizer, device, self.clock)
        parts = EngineParts("meta", runner, scheduler, self.pool, self_pool, None, ahead)
        prompts = PromptBuilder(cell.tokenizer, cell.checkpoint.dims)
        self.core = DecoderCore(parts, importer, prompts, settings, self.wake, runner.nothing, now)

    def turn(self) -> float | None:
        if self.core.turn():
            return 0.0
        return self.core.sleep_s() if self.core.n_live else None

    def look_after_leases(self) -> None:
        self._importer.renew()

    def signals(self) -> DecoderSignals:
        return self.core.stats().signals()


SimWorker = SimEncoder | SimDecoder


def _pool(layout: PageLayout, n_windows: int) -> PagePool:
    """A pool with addresses but without memory."""
    return PagePool(layout, n_windows * layout.pages_per_window, "meta")


class SimImporter:
    """Replaces `KVImporter`. No READ times out."""

    def __init__(self, pool: PagePool, cell: Cell, node: str, clock: Callable[[], float]) -> None:
        self.pool, self.layout = pool, pool.layout
        self._cell, self._node, self._clock = cell, node, clock
        self._held: dict[str, CrossKVHandle] = {}  # by lease

    def accept(self, handle: CrossKVHandle) -> None:
        self._held[handle.lease] = handle

    def fetch(self, handle: CrossKVHandle, pages: Sequence[int]) -> Future[FetchStats]:
        arrival: Future[FetchStats] = Future()
        source, now_s = self._cell.exporters[handle.agent], self._clock()
        n_bytes = len(pages) * self.pool.filled_bytes(handle.frames)
        seconds = self._cell.links.read_s(n_bytes, source.node, self._node, now_s)
        stats = FetchStats(n_bytes, seconds, "simulated")
        self._cell.loop.call_at(now_s + seconds, self._arrive, handle, stats, arrival)
        return arrival

    def drop(self, handle: CrossKVHandle) -> None:
        if self._held.pop(handle.lease, None) is not None:
            self._cell.exporters[handle.agent].on_notification(release_message(handle.lease))

    def renew(self) -> None:
        for lease, handle in self._held.items():
            for message in renewal_messages([lease]):
                self._cell.exporters[handle.agent].on_notification(message)

    def _arrive(
        self, handle: CrossKVHandle, stats: FetchStats, arrival: Future[FetchStats]
    ) -> None:
        self.drop(handle)
        arrival.set_result(stats)

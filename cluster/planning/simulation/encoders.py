"""A simulated encoder: the real engine's queue, loop, pages and leases, and a waiting device.

What is real: `EncoderCore`, `Batcher`, `EncodeLoop`, `Publisher`, `KVReuse`, `KVExporter`. What is
not: the computation of a batch, which takes what the profile says.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from random import Random
from typing import Any

from cluster.kv.exporter import KVExporter
from cluster.kv.layout import PageLayout
from cluster.kv.transfer_config import TransferConfig
from cluster.messages import EncodeReply, EncodeRequest, Location, WorkerLoad
from cluster.metrics import ENCODER_METRICS, silent_recorder
from cluster.planning.profile import Surface
from cluster.planning.simulation.parts import CellParts
from cluster.planning.simulation.transfer import Exported, NobodysWire, NoThread
from cluster.planning.simulation.worker import Device, SimWorker, WorkerClock
from cluster.serve.replicas.busy_share import BusyShare
from encoder_worker.batcher import Batcher
from encoder_worker.core import EncoderCore
from encoder_worker.loop import IDLE_WAIT_S, PAGE_WAIT_S, EncodeLoop
from encoder_worker.publisher import KVReuse

EXPIRY_S = 1.0  # between two looks for leases that ran out


class WaitingForward:
    """In the place of `WindowEncoder`: launches seconds."""

    def __init__(
        self, surface: Surface, n_audio_ctx: int, device: Device, clock: WorkerClock, overlaps: bool
    ) -> None:
        self.is_async = overlaps
        self._surface = surface
        self._n_audio_ctx = n_audio_ctx
        self._device = device
        self._clock = clock

    def __call__(
        self,
        windows: Sequence[Any],
        pool: Any,
        pages: Sequence[Sequence[int]],
        file_mels: Any = None,
        context: int = 0,
    ) -> WaitingReady:
        seconds = self._surface.at(len(windows), context or self._n_audio_ctx)
        return WaitingReady(self._clock, self._device.launch(self._clock.now(), seconds))


class WaitingReady:
    """What the loop waits for: the device is done at a time that is known."""

    def __init__(self, clock: WorkerClock, at_s: float) -> None:
        self._clock = clock
        self._at_s = at_s

    def wait(self) -> None:
        self._clock.wait_until(self._at_s)


class SimEncoder(SimWorker):
    """One encoder. `device` is another role's too where both are in one process."""

    def __init__(self, name: str, location: Location, cell: CellParts, device: Device) -> None:
        super().__init__(name, location, cell.profile.router.hop_s, device)
        profile, settings = cell.profile, cell.settings.encoder
        now = self.clock.now
        states = cell.settings.handoff == "encoder_states"
        layout: PageLayout = profile.states_layout() if states else profile.kv_layout()
        self._exporter = _exporter(name, layout, settings.export_windows, now, cell.random)
        self._batcher = Batcher(
            settings.max_batch,
            settings.batch_wait_ms / 1000,
            clock=now,
            bulk_at_once=settings.bulk_windows,
        )
        reuse = KVReuse(self._exporter, profile.kv_dtype, settings.cache)
        forward: Any = WaitingForward(
            cell.encode_surface,
            profile.shape.n_audio_ctx,
            device,
            self.clock,
            profile.encoder.overlaps,
        )
        recorder = silent_recorder(ENCODER_METRICS)
        self._loop = EncodeLoop(
            self._batcher,
            self._exporter,
            reuse,
            forward,
            settings.max_batch,
            recorder,
            now,
            blocks=False,
        )
        n_audio_ctx = profile.shape.n_audio_ctx
        self.core = EncoderCore(self._exporter, self._batcher, reuse, self._loop, n_audio_ctx)
        self._busy = BusyShare(clock=now)
        self._waits_for_pages = False
        self._expiring = False
        self.exported = Exported(self._exporter, location, self._on_release)
        cell.links.exported[name] = self.exported

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        return self.core.submit(request)

    def load(self) -> WorkerLoad:
        return self.core.load()

    def signals(self) -> dict[str, float]:
        stats = self.core.stats()
        return asdict(stats.signals(self._busy.share(stats.encode_s)))

    def begin_drain(self) -> None:
        self.core.begin_drain()

    def is_idle(self) -> bool:
        return self.core.is_idle()

    def turn(self) -> float | None:
        """The loop's thread: a batch is launched and waited for, or there is none yet."""
        if not self._loop.has_launched:
            self._loop.begin()
        if self._loop.has_launched:
            self._loop.go_on()
            self._watch_leases()
            return 0.0
        self._waits_for_pages = False
        if not len(self._batcher):
            self._batcher.ready_in_s()  # notes that the queue is empty
            return None
        ready_s = self._batcher.ready_in_s()
        if ready_s == 0.0:
            self._waits_for_pages = True
            return PAGE_WAIT_S
        return IDLE_WAIT_S if ready_s is None else min(ready_s, IDLE_WAIT_S)

    def kill(self, detected_after_s: float) -> None:
        super().kill(detected_after_s)
        self.exported.is_alive = False

    def abandon(self, submitted: Future[Any]) -> None:
        if submitted.done() and submitted.exception() is None:
            self.core.revoke(submitted.result().handle)

    def pages(self) -> tuple[int, int]:
        n_pages = self._exporter.pool.n_pages
        return n_pages - self._exporter.n_free_pages, n_pages

    def queued(self) -> float:
        return self._batcher.queued_work

    def _on_release(self) -> None:
        if self._waits_for_pages:
            self.wake()

    def _watch_leases(self) -> None:
        if not self._expiring:
            self._expiring = True
            self._event_loop.call_later(EXPIRY_S, self._expire)

    def _expire(self) -> None:
        self._expiring = False
        if self.is_dead:
            return
        self._exporter.expire()
        if self._exporter.published.n_leases:
            self._watch_leases()
        self._on_release()


def _exporter(
    name: str, layout: PageLayout, n_windows: int, now: Any, random: Random
) -> KVExporter:
    config = TransferConfig(
        cluster_key=b"simulated",
        name=name,
        device="meta",  # pages have addresses and no memory
        clock=now,
        randbits=random.getrandbits,
    )
    n_pages = n_windows * layout.pages_per_window
    wire: Any = NobodysWire(name)
    return KVExporter(layout, n_pages, config, wire, NoThread)

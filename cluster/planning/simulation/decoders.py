"""A simulated decoder: the real engine's scheduler, loop and pages, and a waiting device.

What is real: `DecoderCore`, `DecodeLoop`, `LaunchQueue`, `Scheduler`, the page pools, the searches
that grow token by token. What is not: the forward of the model, which takes what the profile says
and gives as many tokens as the request has.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

from cluster.kv.connect import LANDING_WINDOWS
from cluster.kv.pool import PagePool
from cluster.messages import DecodeRequest, DecodeResult, Location, WorkerLoad
from cluster.planning.simulation.parts import CellParts, as_checkpoint
from cluster.planning.simulation.routers import Texts
from cluster.planning.simulation.transfer import SimImporter
from cluster.planning.simulation.worker import Device, SimWorker, WorkerClock
from decoder_worker.build import EngineParts
from decoder_worker.core import DecoderCore
from decoder_worker.prompts import PromptBuilder
from decoder_worker.readback import Launched
from decoder_worker.sampling.search import StepOutput
from decoder_worker.scheduling.scheduler import Scheduler
from decoder_worker.scheduling.sequence import DecodeSequence

POSITIONS_STEP = 50  # to which a batch's mean context is rounded


@dataclass(frozen=True, slots=True)
class WaitingLaunch(Launched):
    """A forward that is done at a time that is known."""

    done_s: float = 0.0
    is_language: bool = False


class WaitingRunner:
    """In the place of `ModelRunner`."""

    def __init__(self, cell: CellParts, device: Device, clock: WorkerClock, texts: Texts) -> None:
        self._steps, self._prefills = cell.step_surface, cell.prefill_surface
        self._device = device
        self._clock = clock
        self._texts = texts

    def detect_language(self, sequences: Sequence[DecodeSequence]) -> WaitingLaunch:
        return self._launch(sequences, [1] * len(sequences), self._steps, is_language=True)

    def prefill(self, sequences: Sequence[DecodeSequence]) -> WaitingLaunch:
        return self._launch(sequences, _n_rows(sequences), self._prefills)

    def decode(self, sequences: Sequence[DecodeSequence]) -> WaitingLaunch:
        return self._launch(sequences, _n_rows(sequences), self._steps)

    def collect(self, launch: WaitingLaunch) -> list[list[StepOutput]]:
        self._clock.wait_until(launch.done_s)
        texts = self._texts
        if launch.is_language:
            return [[texts.language] for _ in launch.sequences]
        return [
            [texts.next_output(s, row) for row in s.live] if s.search is not None else []
            for s in launch.sequences
        ]

    def most_steps(self, sequences: Sequence[DecodeSequence]) -> int:
        return 1

    def listen(self) -> None:
        """Nothing is ever under way."""

    def interrupt(self) -> None:
        """Nothing is ever under way."""

    def restore(self, sequence: DecodeSequence) -> None:
        """Nothing is on a device."""

    def copy_kv(self, sequence: DecodeSequence, copies: Sequence[Any]) -> None:
        """Its time is a part of the step's."""

    def align(self, sequences: Sequence[DecodeSequence]) -> list[None]:
        return [None] * len(sequences)

    def peaks(self, sequences: Sequence[DecodeSequence]) -> list[tuple[int, ...]]:
        return [()] * len(sequences)

    def _launch(
        self,
        sequences: Sequence[DecodeSequence],
        n_rows: list[int],
        surface: Any,
        *,
        is_language: bool = False,
    ) -> WaitingLaunch:
        mean = sum([s.request.handle.frames for s in sequences]) / len(sequences)
        positions = round(mean / POSITIONS_STEP) * POSITIONS_STEP
        seconds = surface.at(sum(n_rows), positions)
        done_s = self._device.launch(self._clock.now(), seconds)
        return WaitingLaunch(tuple(sequences), tuple(n_rows), (), done_s, is_language)


@dataclass(slots=True)
class WaitingProjected:
    """A projection of states that is done at a time that is known."""

    clock: WorkerClock
    done_s: float

    def is_done(self) -> bool:
        return self.clock.now() >= self.done_s

    def wait(self) -> None:
        self.clock.wait_until(self.done_s)


class WaitingProjection:
    """In the place of `StatesProjection`."""

    def __init__(
        self, projection_s: float, n_audio_ctx: int, device: Device, clock: WorkerClock
    ) -> None:
        self.projection_s = projection_s
        self._n_audio_ctx = n_audio_ctx
        self._device = device
        self._clock = clock

    def project(self, sequences: Sequence[DecodeSequence]) -> list[WaitingProjected]:
        windows = sum(s.n_positions for s in sequences) / self._n_audio_ctx
        done_s = self._device.launch(self._clock.now(), windows * self.projection_s)
        return [WaitingProjected(self._clock, done_s)] * len(sequences)


class SimDecoder(SimWorker):
    """One decoder. `device` is another role's too where both are in one process."""

    def __init__(self, name: str, location: Location, cell: CellParts, device: Device) -> None:
        super().__init__(name, location, cell.profile.router.hop_s, device)
        profile, settings = cell.profile, cell.settings.decoder
        self._pool = _pool(profile.kv_layout(), settings.kv_windows)
        landing: PagePool | None = None
        projection: Any = None
        if cell.settings.handoff == "encoder_states":
            landing = _pool(profile.states_layout(), min(settings.kv_windows, LANDING_WINDOWS))
            projection = WaitingProjection(
                profile.decoder.projection_s, profile.shape.n_audio_ctx, device, self.clock
            )
        now, read_s = self.clock.now, settings.fetch_timeout_s
        importer: Any = SimImporter(landing or self._pool, cell.links, location.node, now, read_s)
        self_layout = profile.self_layout()
        self_pool = PagePool(self_layout, settings.max_batch + 1, "meta")
        scheduler = Scheduler(
            self._pool, self_pool, 1, settings.max_batch, settings.bulk_share, landing
        )
        prompts = PromptBuilder(cell.tokenizer, as_checkpoint(profile).dims)
        texts = Texts(cell.tokenizer, cell.traffic)
        runner: Any = WaitingRunner(cell, device, self.clock, texts)
        steps_ahead = settings.steps_ahead
        if steps_ahead is None:
            steps_ahead = profile.decoder.steps_ahead
        parts = EngineParts(
            "meta", runner, scheduler, self._pool, self_pool, projection, steps_ahead
        )
        self.core = DecoderCore(parts, importer, prompts, settings, self.wake, now)

    def submit(self, request: DecodeRequest) -> Future[DecodeResult]:
        return self.core.submit(request)

    def load(self) -> WorkerLoad:
        return self.core.load()

    def signals(self) -> dict[str, float]:
        return asdict(self.core.stats().signals())

    def begin_drain(self) -> None:
        self.core.begin_drain()

    def is_idle(self) -> bool:
        return not self.core.n_live

    def turn(self) -> float | None:
        """One step; where nothing can run, until a deadline or until it is woken."""
        if self.core.turn():
            return 0.0
        return self.core.sleep_s() if self.core.n_live else None

    def pages(self) -> tuple[int, int]:
        return self._pool.n_used, self._pool.n_pages

    def queued(self) -> float:
        return self.core.stats().waiting

    def abandon(self, submitted: Future[Any]) -> None:
        """What it held came back with the answer."""


def _n_rows(sequences: Sequence[DecodeSequence]) -> list[int]:
    return [len(s.search.live) if s.search is not None else 0 for s in sequences]


def _pool(layout: Any, n_windows: int) -> PagePool:
    """Pages with addresses and no memory."""
    return PagePool(layout, n_windows * layout.pages_per_window, "meta")

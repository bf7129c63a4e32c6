"""The two roles of a simulated worker: real engines over devices that wait.

The forwards only take what the profile says; the decoder's gives as many tokens as the request has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.kv.wire import TransferConfig
from cluster.common.metrics import ENCODER_METRICS, silent_recorder
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile import Profile, Surface
from cluster.planning.scenario import LoadRequest
from cluster.planning.worker import Cell, Device, SimImporter, SimWorker, WorkerClock
from cluster.serve.replicas.replica_setup import BusyShare
from decoder_worker.build import EngineParts
from decoder_worker.engine import DecoderCore
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row, StepOutput
from decoder_worker.scheduling.scheduler import ALONE, TOGETHER, Scheduler
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.step import Launched
from encoder_worker.batcher import Batcher
from encoder_worker.core import EncoderCore
from encoder_worker.loop import IDLE_WAIT_S, PAGE_WAIT_S, EncodeLoop
from encoder_worker.publisher import Publisher

POSITIONS_STEP = 50  # to which a batch's mean context is rounded
LOGPROB = -0.1
TEXT = (1000, 1448)  # of the vocabulary: one for each token that a window may have
MEL_PER_STEP = 2  # mel frames in a timestamp's step of 20 ms


class WaitingForward:
    """In the place of `WindowEncoder`: launches seconds."""

    def __init__(self, profile: Profile, device: Device, clock: WorkerClock) -> None:
        self.is_async = profile.encoder.overlaps
        self._surface = Surface(profile.encoder.points)
        self._n_audio_ctx = profile.shape.n_audio_ctx
        self._device = device
        self._clock = clock

    def __call__(
        self,
        windows: Sequence[Any],
        _pool: Any,
        _pages: Any,
        _file_mels: Any = None,
        context: int = 0,
    ) -> Callable[[], None]:
        seconds = self._surface.at(len(windows), context or self._n_audio_ctx)
        done_s = self._device.launch(self._clock.now(), seconds)
        return partial(self._clock.wait_until, done_s)

    def close(self) -> None:
        pass


class SimEncoder(SimWorker):
    def __init__(self, name: str, node: str, cell: Cell, device: Device) -> None:
        super().__init__(node, cell, device)
        profile, settings, now = cell.profile, cell.settings.encoder, self.clock.now
        layout = profile.kv_layout()
        config = TransferConfig(
            cluster_key=b"simulated",
            name=name,
            device="meta",  # pages have addresses and no memory
            clock=now,
            randbits=cell.random.getrandbits,
        )
        n_pages = settings.export_windows * layout.pages_per_window
        # Readers call the exporter directly, so that its wire is nobody, and no thread runs it.
        wire: Any = SimpleNamespace(
            agent=name, transport="simulated", metadata=b"", open=lambda *_: None
        )
        self._exporter = KVExporter(layout, n_pages, config, wire, _without_thread)
        self.pool = self._exporter.pool
        wait_s, bulk = settings.batch_wait_ms / 1000, settings.bulk_windows
        self._batcher = Batcher(settings.max_batch, wait_s, clock=now, bulk_at_once=bulk)
        forward: Any = WaitingForward(profile, device, self.clock)
        recorder = silent_recorder(ENCODER_METRICS)
        publisher = Publisher(
            self._exporter, recorder, now, profile.kv_dtype, reuses=settings.cache
        )
        most = settings.max_batch
        self._loop = EncodeLoop(self._batcher, publisher, forward, most, blocks=False)
        self.core = EncoderCore(publisher, (self._loop,), profile.shape.n_audio_ctx)
        self._busy, self._bulk_busy = BusyShare(clock=now), BusyShare(clock=now)
        cell.links.exporters[name] = self

    def turn(self) -> float | None:
        if not self._loop.has_launched:
            self._loop.begin()
        if self._loop.has_launched:
            self._loop.go_on()
            return 0.0
        ready_s = self._batcher.ready_in_s()  # notes where the queue is empty
        if not len(self._batcher):
            return None
        if ready_s == 0.0:
            return PAGE_WAIT_S
        return IDLE_WAIT_S if ready_s is None else min(ready_s, IDLE_WAIT_S)

    def on_notification(self, message: bytes) -> None:
        if not self.is_dead:
            self._exporter.handle_notifications([message])
            self.wake()  # pages may have come free

    def look_after_leases(self) -> None:
        self._exporter.expire()
        self.wake()

    def signals(self) -> Any:
        stats = self.core.stats()
        busy = self._busy.share(stats.encode_s - stats.bulk_s)
        return stats.signals(busy, self._bulk_busy.share(stats.bulk_s))

    def is_idle(self) -> bool:
        return bool(self.core.is_idle())

    def abandon(self, submitted: Future[Any]) -> None:
        if submitted.done() and submitted.exception() is None:
            self.core.revoke(submitted.result().handle)


def _without_thread(_owner: str, start: Callable[[], None], *_: Any) -> Any:
    """In the place of `WireThread`: starts at once, and runs nothing."""
    start()
    return SimpleNamespace(failure=None)


@dataclass(frozen=True, slots=True)
class WaitingLaunch(Launched):
    done_s: float = 0.0
    is_language: bool = False


class WaitingRunner:
    """In the place of `ModelRunner`."""

    def __init__(self, profile: Profile, texts: Texts, device: Device, clock: WorkerClock) -> None:
        self._steps = Surface(profile.decoder.steps)
        self._prefills = Surface(profile.decoder.prefills)
        self._texts = texts
        self._device = device
        self._clock = clock

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

    def align(self, sequences: Sequence[DecodeSequence]) -> list[None]:
        return [None] * len(sequences)

    def peaks(self, sequences: Sequence[DecodeSequence]) -> list[tuple[int, ...]]:
        return [()] * len(sequences)

    def nothing(self, *_: Any) -> None:
        pass  # a copy's time is a part of the step's

    listen = interrupt = restore = copy_kv = nothing

    def _launch(
        self,
        sequences: Sequence[DecodeSequence],
        n_rows: list[int],
        surface: Surface,
        *,
        is_language: bool = False,
    ) -> WaitingLaunch:
        mean = sum([s.request.handle.frames for s in sequences]) / len(sequences)
        positions = round(mean / POSITIONS_STEP) * POSITIONS_STEP
        done_s = self._device.launch(self._clock.now(), surface.at(sum(n_rows), positions))
        return WaitingLaunch(tuple(sequences), tuple(n_rows), (), done_s, is_language)


class SimDecoder(SimWorker):
    def __init__(self, name: str, node: str, cell: Cell, device: Device) -> None:
        super().__init__(node, cell, device)
        profile, settings, now = cell.profile, cell.settings.decoder, self.clock.now
        self.pool = _pool(profile.kv_layout(), settings.kv_windows)
        self._importer = SimImporter(self.pool, cell.links, node, now, settings.fetch_timeout_s)
        importer: Any = self._importer
        n_text = profile.shape.n_text_ctx
        self_layout = replace(profile.kv_layout(), n_frames=n_text, page_frames=n_text)
        self_pool = _pool(self_layout, settings.max_batch + 1)
        order = TOGETHER if profile.decoder.steps_ahead else ALONE  # a GPU's, or a CPU's
        scheduler = Scheduler(
            self.pool, self_pool, 1, settings.max_batch, settings.bulk_share, None, order
        )
        texts = Texts(cell.tokenizer, cell.requests)
        runner: Any = WaitingRunner(profile, texts, device, self.clock)
        ahead = settings.steps_ahead
        ahead = profile.decoder.steps_ahead if ahead is None else ahead
        parts = EngineParts("meta", runner, scheduler, self.pool, self_pool, None, ahead)
        prompts = PromptBuilder(cell.tokenizer, cell.dims)
        self.core = DecoderCore(parts, importer, prompts, settings, self.wake, runner.nothing, now)

    def turn(self) -> float | None:
        if self.core.turn():
            return 0.0
        return self.core.sleep_s() if self.core.n_live else None

    def look_after_leases(self) -> None:
        self._importer.renew()

    def signals(self) -> Any:
        return self.core.stats().signals()

    def is_idle(self) -> bool:
        return not self.core.n_live


class Texts:
    """Tokens of the rows of one decoder: a timestamp, text, and a timestamp at the audio's end.

    The text does not repeat itself: the decoder tries one that does at another temperature.
    """

    def __init__(self, tokenizer: WhisperTokenizer, requests: dict[str, LoadRequest]) -> None:
        self._requests = requests
        self._n_tokens: dict[int, int] = {}  # of the sequence that holds a slot
        special = tokenizer.special
        self.language = StepOutput(special.languages.get("en", special.eot), LOGPROB)
        self._end = StepOutput(special.eot, LOGPROB)
        self._text = [StepOutput(token, LOGPROB) for token in range(*TEXT)]
        self._stamps = [StepOutput(special.timestamp_begin + n, LOGPROB) for n in range(1501)]

    def next_output(self, sequence: DecodeSequence, row: Row) -> StepOutput:
        n_given, slot = len(row.tokens), sequence.rows[0].slot
        if n_given == 0:
            self._n_tokens[slot] = min(self.n_tokens(sequence), sequence.n_new_max)
        n_tokens = self._n_tokens[slot]
        if n_given >= n_tokens:
            return self._end
        if n_given == 0:
            return self._stamps[0]
        if n_given == n_tokens - 1:
            return self._stamps[sequence.request.content_frames // MEL_PER_STEP]
        return self._text[n_given]

    def n_tokens(self, sequence: DecodeSequence) -> int:
        request = self._requests.get(sequence.request.request_id)  # None: its caller has left
        return request.n_tokens(sequence.request.content_frames) if request is not None else 0


def _n_rows(sequences: Sequence[DecodeSequence]) -> list[int]:
    return [len(s.search.live) if s.search is not None else 0 for s in sequences]


def _pool(layout: PageLayout, n_windows: int) -> PagePool:
    """Pages with addresses and no memory."""
    return PagePool(layout, n_windows * layout.pages_per_window, "meta")

"""Makes a profile: times both workers' parts in this process, and a server where one is given.

The parts are those of a served worker, with the kernels that this machine compiles. They are timed
one after another, and the fastest of some rounds counts: a profile is of a worker that has its
device to itself.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import psutil

from cluster.common.kernels.cpu.background import longest_wait_s, wait_for_builds
from cluster.common.kv.connect import make_exporter, make_importer, served_kv_layout
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.pool import PagePool, Pages
from cluster.common.messages import (
    SAMPLE_RATE,
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeRequest,
)
from cluster.common.model.checkpoint import Checkpoint, open_checkpoint
from cluster.common.model.device import usable_cores, use_step_threads
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import Settings
from cluster.planning.measure_server import time_server
from cluster.planning.profile import (
    AudioProfile,
    DecoderProfile,
    EncodePoint,
    EncoderProfile,
    LinkProfile,
    Profile,
    RouterProfile,
    Shape,
    StartProfile,
    StepPoint,
)
from cluster.serve.distribution import build_id
from cluster.serve.in_process import on_one_device, sized_together
from decoder_worker.build import build_parts
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence
from encoder_worker.engine import EncoderEngine, auto_batch

# Assumed where no server is given to measure: a router's processor time is what router and proxy
# took on two cores of an EPYC; the others nobody has measured.
USUAL_ROUTER = RouterProfile(request_s=0.0048, window_s=0.0, hop_s=0.002)
USUAL_AUDIO = AudioProfile(request_s=0.004, audio_second_s=0.002)
PROCESS_S = 3.0  # until Ray has a process for a replica, and it has imported what it needs
PACKAGES = ("splitscribe", "torch", "ray", "nixl-cu13", "numba")
CONTEXTS = (320, 768)  # beside the whole window's
ROWS = (1, 2, 4, 8, 16, 32, 64)
WARM_UP = 3  # rounds that do not count
ANSWER_S = 120.0
NOISE = 300.0  # of int16: the time does not depend on what is said
WINDOW_S = 2.0  # of audio in a window: all contexts hold it
LEAST_LATENCY_S = 1e-6

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """name: of the profile. url: of a server, for its router. rounds: the fastest counts."""

    name: str
    settings: Settings
    url: str | None = None
    api_key: str | None = None
    rounds: int = 9


def measure(asked: Asked, tell: Tell) -> Profile:
    """Measure all of it; takes a minute or so on two cores.

    Raises:
        ConfigurationError: settings and checkpoint do not fit this machine, or there is no server.
    """
    router, audio = USUAL_ROUTER, USUAL_AUDIO
    if asked.url is not None:  # first: a wrong address is told at once
        router, audio = time_server(asked.url, asked.rounds, asked.api_key, tell)
    checkpoint = open_checkpoint(asked.settings.model)
    settings = on_one_device(asked.settings)
    device = settings.encoder.device
    settings = sized_together(settings, checkpoint, device)
    settings = settings.model_copy(update={"cluster_key": os.urandom(32).hex()})
    layout = served_kv_layout(checkpoint, settings, device)
    with ExitStack() as stack:
        began = time.monotonic()
        exporter = make_exporter(checkpoint, settings, device, "encoder")
        stack.callback(exporter.close)
        importer = make_importer(checkpoint, settings, device, "decoder")
        stack.callback(importer.close)
        bench = Bench(checkpoint, settings, exporter, importer, asked.rounds, tell)
        decoder = bench.decoder()
        start_s = PROCESS_S + bench.built_s - began
        handoff = bench.handoff()
        encoder = bench.encoder()
    of_router = f"measured at {asked.url}" if asked.url else "assumed"
    return Profile(
        name=asked.name,
        predicted=False,
        source=f"splitscribe profile, the fastest of {asked.rounds}, one worker alone; router "
        f"and audio {of_router}; load of the machine {os.getloadavg()[0]:.1f}",
        machine={
            "cpu": _cpu_name(),
            "cores": usable_cores(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "device": device,
        },
        versions=_versions(),
        commit=build_id(),
        model=checkpoint.name,
        shape=Shape.of(checkpoint.dims),
        kv_dtype=layout.dtype,
        page_frames=layout.page_frames,
        encoder=encoder,
        decoder=decoder,
        handoff=handoff,
        router=router,
        audio=audio,
        start_s=StartProfile(encoder=start_s, decoder=start_s, router=start_s),
    )


@dataclass(slots=True)
class Bench:
    """The parts of both workers. settings: with all sizes filled in. Call on one thread.

    built_s: when the decoder's parts were there, by the monotonic clock.
    """

    checkpoint: Checkpoint
    settings: Settings
    exporter: KVExporter
    importer: KVImporter
    rounds: int
    tell: Tell
    built_s: float = 0.0

    @property
    def contexts(self) -> list[int]:
        whole = self.checkpoint.dims.n_audio_ctx
        return [*(context for context in CONTEXTS if context < whole), whole]

    def fastest(self, seconds: Callable[[], float]) -> float:
        return min([seconds() for _ in range(WARM_UP + self.rounds)][WARM_UP:])

    def encoder(self) -> EncoderProfile:
        """Batches, by windows and positions, each size by an engine of its own."""
        settings, whole = self.settings.encoder, self.checkpoint.dims.n_audio_ctx
        most = settings.max_batch or auto_batch(settings.device)
        points = []
        for size in sorted({1, min(2, most), most}):
            sized = {"max_batch": size, "batch_wait_ms": 1000.0, "cache": False}
            engine = EncoderEngine(
                self.checkpoint,
                self.exporter,
                settings.model_copy(update=sized),
                kernels_s=longest_wait_s(self.settings.kernels),
            )
            try:
                for context in self.contexts:
                    asked = 0 if context == whole else context
                    seconds = self.fastest(lambda: _batch_s(engine, size, asked))  # noqa: B023
                    points.append(EncodePoint(batch=size, positions=context, seconds=seconds))
                    self.tell(
                        f"encoder: {size} windows of {context} positions in {1000 * seconds:.1f} ms"
                    )
            finally:
                engine.close()
        return EncoderProfile(
            points=tuple(points),
            max_batch=most,
            export_windows=settings.export_windows,
            overlaps=True,
        )

    def decoder(self) -> DecoderProfile:
        """Prompts and decode steps, by rows and positions."""
        settings = self.settings.decoder
        tokenizer = WhisperTokenizer.from_checkpoint(self.checkpoint)
        parts = build_parts(self.checkpoint, tokenizer, self.importer, None, settings, 0)
        prompts = PromptBuilder(tokenizer, self.checkpoint.dims)
        use_step_threads(settings.threads)
        kernels_s = longest_wait_s(self.settings.kernels)
        if kernels_s and parts.device == "cpu":
            wait_for_builds(kernels_s)
        self.importer.pool.tensor.zero_()
        parts.self_pool.tensor.zero_()
        self.built_s = time.monotonic()
        runner, most = parts.runner, settings.max_batch
        steps, prefills = [], []

        def prefill_s() -> float:
            began = time.perf_counter()
            runner.collect(runner.prefill(sequences))
            return time.perf_counter() - began

        def step_s() -> float:
            for sequence in sequences:
                sequence.live[0].tokens.append(prompts.eot)
                runner.restore(sequence)
            began = time.perf_counter()
            runner.collect(runner.decode(sequences))
            return time.perf_counter() - began

        for n_rows in sorted({n for n in ROWS if n < most} | {most}):
            for context in self.contexts:
                rows = [Row(n, _pages(parts.self_pool, 1)) for n in range(n_rows)]
                sequences = [self._sequence(prompts, row, context) for row in rows]
                prompt_s, one_s = self.fastest(prefill_s), self.fastest(step_s)
                for sequence in sequences:
                    self.importer.pool.release(sequence.cross_pages)
                    parts.self_pool.release(sequence.rows[0].self_pages)
                prefills.append(StepPoint(rows=n_rows, positions=context, seconds=prompt_s))
                steps.append(StepPoint(rows=n_rows, positions=context, seconds=one_s))
                self.tell(
                    f"decoder: {n_rows} rows of {context} positions: prompts in "
                    f"{1000 * prompt_s:.2f} ms, a step in {1000 * one_s:.2f} ms"
                )
        return DecoderProfile(
            steps=tuple(steps),
            prefills=tuple(prefills),
            max_batch=most,
            kv_windows=settings.kv_windows,
            steps_ahead=parts.steps_ahead,
        )

    def _sequence(self, prompts: PromptBuilder, row: Row, context: int) -> DecodeSequence:
        """Silence of so many positions, in pages of its own."""
        pool, options = self.importer.pool, DecodeOptions()
        sequence = DecodeSequence(
            DecodeRequest("", 0, 0, _handle_of(context), options, 0.0),
            Future(),
            arrived=0.0,
            deadline=ANSWER_S,
            n_new_max=prompts.n_new_max(options),
            language=prompts.any_language,
            rows=[row],
            cross_pages=_pages(pool, pool.layout.pages_for(context)),
        )
        sequence.prompt = prompts.prompt(options, prompts.any_language)
        sequence.begin_attempt(prompts.eot)
        return sequence

    def handoff(self) -> LinkProfile:
        """Latency and rate, of the line through a short window's READ and a whole one's."""
        layout, pool = self.exporter.layout, self.importer.pool
        whole = layout.n_frames
        short = max(1, whole // 10) if pool.packs else layout.page_frames
        times = {n: self.fastest(lambda: self._read_s(n)) for n in {short, whole}}  # noqa: B023
        n_bytes = {n: layout.pages_for(n) * pool.filled_bytes(n) for n in times}
        rate = n_bytes[whole] / times[whole]
        if times[whole] > times[short]:
            rate = (n_bytes[whole] - n_bytes[short]) / (times[whole] - times[short])
        latency_s = max(LEAST_LATENCY_S, times[whole] - n_bytes[whole] / rate)
        transport = self.importer.transport
        megabytes, ms = n_bytes[whole] / 1e6, 1000 * times[whole]
        self.tell(f"hand-off by {transport}: {megabytes:.1f} MB in {ms:.2f} ms")
        return LinkProfile(transport=transport, latency_s=latency_s, bytes_per_s=rate)

    def _read_s(self, frames: int) -> float:
        n_pages = self.exporter.layout.pages_for(frames)
        pages = self.exporter.reserve(n_pages, ANSWER_S)
        assert pages is not None
        target = _pages(self.importer.pool, n_pages)
        handle = self.exporter.publish(
            pages, request_id="profile", window=0, attempt=1, frames=frames
        )
        self.importer.accept(handle)
        stats = self.importer.fetch(handle, target).result(ANSWER_S)
        self.importer.pool.release(target)
        return stats.seconds


def _batch_s(engine: EncoderEngine, size: int, context: int) -> float:
    """One batch, alone: the engine's own figure, which has the projection and no queue."""
    rng = np.random.default_rng(size)
    pcm = (NOISE * rng.standard_normal(round(WINDOW_S * SAMPLE_RATE))).astype(np.int16)
    futures = [
        engine.submit(EncodeRequest("profile", index, 1, pcm, ANSWER_S, context=context))
        for index in range(size)
    ]
    replies = [future.result(ANSWER_S) for future in futures]
    for reply in replies:
        engine.revoke(reply.handle)
    # An idle engine takes the first window at once: what it left for the next batch is counted too.
    found = {reply.timings.encode_s: reply.timings.batch_size for reply in replies}
    return sum(found) * size / sum(found.values())


def _handle_of(context: int) -> CrossKVHandle:
    return CrossKVHandle("", 0, 0, "", b"", "", (), 0, context, 0, 0, "", 0.0)


def _pages(pool: PagePool, n_pages: int) -> Pages:
    pages = pool.allocate(n_pages, ANSWER_S)
    assert pages is not None
    return pages


def _cpu_name() -> str:
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found

"""Times an encoder worker, a decoder worker and the hand-off between them, in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from cluster.jit.background import wait_for_builds
from cluster.kv.exporter import KVExporter
from cluster.kv.importer import KVImporter
from cluster.messages import (
    SAMPLE_RATE,
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    EncodeReply,
    EncodeRequest,
)
from cluster.model.checkpoint import Checkpoint
from cluster.model.device import use_step_threads
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.profile import EncodePoint, LinkProfile, StepPoint
from cluster.settings import DecoderSettings, EncoderSettings
from decoder_worker.build import EngineParts, build_parts
from decoder_worker.prompts import PromptBuilder
from decoder_worker.sampling.search import Row
from decoder_worker.scheduling.sequence import DecodeSequence
from encoder_worker.engine import EncoderEngine

ANSWER_S = 120.0
NOISE = 300.0  # of int16: the time does not depend on what is said
FIRST = 2  # batches that warm up
WINDOW_S = 2.0  # of audio in a window: all contexts hold it

Tell = Callable[[str], None]


def time_batches(
    checkpoint: Checkpoint,
    exporter: KVExporter,
    settings: EncoderSettings,
    batches: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    kernels_s: float,
    tell: Tell,
) -> list[EncodePoint]:
    """The fastest of `rounds` batches for each size and context, by an engine for each size.

    contexts: encoder positions; as many as the checkpoint has for whole windows.
    """
    points = []
    for size in batches:
        sized = settings.model_copy(
            update={"max_batch": size, "batch_wait_ms": 1000.0, "cache": False}
        )
        engine = EncoderEngine(checkpoint, exporter, sized, kernels_s=kernels_s)
        try:
            for context in contexts:
                asked = 0 if context == checkpoint.dims.n_audio_ctx else context
                seconds = [_batch_s(engine, size, asked) for _ in range(FIRST + rounds)][FIRST:]
                points.append(EncodePoint(batch=size, positions=context, seconds=min(seconds)))
                ms = 1000 * min(seconds)
                tell(f"encoder: {size} windows of {context} positions in {ms:.1f} ms")
        finally:
            engine.close()
    return points


def _batch_s(engine: EncoderEngine, size: int, context: int) -> float:
    """One batch, alone: the engine's own figure, which has the projection and no queue."""
    rng = np.random.default_rng(size)
    pcm = (NOISE * rng.standard_normal(round(WINDOW_S * SAMPLE_RATE))).astype(np.int16)
    futures = [
        engine.submit(EncodeRequest("profile", index, 1, pcm, ANSWER_S, context=context))
        for index in range(size)
    ]
    replies: list[EncodeReply] = [future.result(ANSWER_S) for future in futures]
    for reply in replies:
        engine.revoke(reply.handle)
    # An idle engine takes the first window at once: what it left for the next batch is counted too.
    found = {reply.timings.encode_s: reply.timings.batch_size for reply in replies}
    return sum(found) * size / sum(found.values())


FIRST = 3  # forwards that warm up
DEADLINE_S = 600.0


class StepTimer:
    """Owns a decoder's parts, without an engine's thread. Call on one thread."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        importer: KVImporter,
        settings: DecoderSettings,
        kernels_s: float,
    ) -> None:
        """settings: with the batch's size filled in."""
        tokenizer = WhisperTokenizer.from_checkpoint(checkpoint)
        self.parts: EngineParts = build_parts(checkpoint, tokenizer, importer, None, settings, 0)
        self._prompts = PromptBuilder(tokenizer, checkpoint.dims)
        self._cross_pool = importer.pool
        use_step_threads(settings.threads)
        if kernels_s and self.parts.device == "cpu":
            wait_for_builds(kernels_s)
        self._cross_pool.tensor.zero_()
        self.parts.self_pool.tensor.zero_()

    def time(
        self, rows: Sequence[int], contexts: Sequence[int], rounds: int, tell: Tell
    ) -> tuple[list[StepPoint], list[StepPoint]]:
        """Decode steps, and prompts: the fastest of `rounds` for each number of rows."""
        steps, prefills = [], []
        for n_rows in rows:
            for context in contexts:
                prefill_s, step_s = self._time(n_rows, context, rounds)
                prefills.append(StepPoint(rows=n_rows, positions=context, seconds=prefill_s))
                steps.append(StepPoint(rows=n_rows, positions=context, seconds=step_s))
                tell(
                    f"decoder: {n_rows} rows of {context} positions: prompts in "
                    f"{1000 * prefill_s:.2f} ms, a step in {1000 * step_s:.2f} ms"
                )
        return steps, prefills

    def _time(self, n_rows: int, context: int, rounds: int) -> tuple[float, float]:
        runner, sequences = (
            self.parts.runner,
            [self._sequence(slot, context) for slot in range(n_rows)],
        )
        try:
            prefills = []
            for _ in range(FIRST + rounds):
                began = time.perf_counter()
                runner.collect(runner.prefill(sequences))
                prefills.append(time.perf_counter() - began)
            steps = []
            for _ in range(FIRST + rounds):
                for sequence in sequences:
                    sequence.live[0].tokens.append(self._prompts.eot)
                    runner.restore(sequence)
                began = time.perf_counter()
                runner.collect(runner.decode(sequences))
                steps.append(time.perf_counter() - began)
        finally:
            for sequence in sequences:
                self._cross_pool.release(sequence.cross_pages)
                self.parts.self_pool.release(sequence.rows[0].self_pages)
        return min(prefills[FIRST:]), min(steps[FIRST:])

    def _sequence(self, slot: int, context: int) -> DecodeSequence:
        """Silence of so many positions, in pages of its own."""
        cross = self._cross_pool.allocate(self._cross_pool.layout.pages_for(context))
        own = self.parts.self_pool.allocate(self.parts.self_pool.layout.pages_per_window)
        assert cross is not None
        assert own is not None
        handle = CrossKVHandle("", 0, 0, "", b"", "", (), 0, context, 0, 0, "", 0.0)
        language, options = self._prompts.any_language, DecodeOptions()
        sequence = DecodeSequence(
            DecodeRequest("", 0, 0, handle, options, 0.0),
            Future(),
            arrived=0.0,
            deadline=DEADLINE_S,
            n_new_max=self._prompts.n_new_max(options),
            language=language,
            rows=[Row(slot, own)],
            cross_pages=cross,
        )
        sequence.prompt = self._prompts.prompt(options, language)
        sequence.begin_attempt(self._prompts.eot)
        return sequence


READ_S = 30.0
FIRST = 2  # READs that warm up
LEAST_LATENCY_S = 1e-6


def time_reads(
    exporter: KVExporter, importer: KVImporter, rounds: int, tell: Callable[[str], None]
) -> LinkProfile:
    """Latency and rate, of the line through a short window's READ and a whole one's."""
    layout = exporter.layout
    whole = layout.n_frames
    short = max(1, whole // 10) if importer.pool.packs else layout.page_frames
    times = {
        frames: min([_read_s(exporter, importer, frames) for _ in range(FIRST + rounds)][FIRST:])
        for frames in {short, whole}
    }
    n_bytes = {
        frames: layout.pages_for(frames) * importer.pool.filled_bytes(frames) for frames in times
    }
    rate = n_bytes[whole] / times[whole]
    if short != whole and times[whole] > times[short]:
        rate = (n_bytes[whole] - n_bytes[short]) / (times[whole] - times[short])
    latency_s = max(LEAST_LATENCY_S, times[whole] - n_bytes[whole] / rate)
    tell(
        f"hand-off by {importer.transport}: {n_bytes[whole] / 1e6:.1f} MB in "
        f"{1000 * times[whole]:.2f} ms"
    )
    return LinkProfile(transport=importer.transport, latency_s=latency_s, bytes_per_s=rate)


def _read_s(exporter: KVExporter, importer: KVImporter, frames: int) -> float:
    n_pages = exporter.layout.pages_for(frames)
    pages = exporter.reserve(n_pages, READ_S)
    target = importer.pool.allocate(n_pages, READ_S)
    assert pages is not None
    assert target is not None
    handle = exporter.publish(pages, request_id="profile", window=0, attempt=1, frames=frames)
    importer.accept(handle)
    stats = importer.fetch(handle, target).result(READ_S)
    importer.pool.release(target)
    return stats.seconds

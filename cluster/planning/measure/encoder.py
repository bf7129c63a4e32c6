"""Times an encoder worker in this process: its batches, by windows and encoder positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cluster.kv.exporter import KVExporter
from cluster.messages import SAMPLE_RATE, EncodeReply, EncodeRequest
from cluster.model.checkpoint import Checkpoint
from cluster.planning.profile.model import EncodePoint
from cluster.settings import EncoderSettings
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

"""Measure a profile of this machine with both engines in one process.

Batches, prompts, steps and READs are timed by the engines; the fastest of several rounds counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import av
import numpy as np

from cluster.common.cores import usable_cores
from cluster.common.kv.connect import served_kv_layout
from cluster.common.messages import CrossKVHandle, DecodeOptions, DecodeRequest, EncodeRequest, Pcm
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.settings import Settings
from cluster.demo.samples import sample_path
from cluster.planning.profile import LinkProfile, Point, Profile, Shape
from cluster.serve.distribution import build_id
from cluster.serve.in_process import LocalEngines, local_engines
from decoder_worker.build import steps_ahead
from encoder_worker.engine import auto_batch

PROCESS_S = 3.0  # for Ray to start a replica's process, and for its imports
CONTEXTS = (320, 768)  # positions, beside the whole window's
ROWS = (1, 2, 4, 8, 16, 32, 64)
ANSWER_S = 3600.0  # for all windows of a round: a large model takes 15 s for one on a few cores
LEAST_LATENCY_S = 1e-6

Tell = Callable[[str], None]


async def measure(name: str, settings: Settings, rounds: int, tell: Tell) -> Profile:
    """Takes about a minute on two cores. Raises ConfigurationError: the settings do not fit."""
    batches = settings.encoder.model_copy(update={"batch_wait_ms": 100.0, "cache": False})
    settings = settings.model_copy(update={"encoder": batches})
    began = time.monotonic()
    async with local_engines(settings, settings.transport) as engines:
        start_s = PROCESS_S + (time.monotonic() - began) / 2  # two engines started
        settings, dims = engines.settings, engines.checkpoint.dims
        device = settings.encoder.device
        with av.open(str(sample_path("medium"))) as audio_file:
            frames = [frame.to_ndarray()[0] for frame in audio_file.decode(audio=0)]
        bench = Bench(engines, np.concatenate(frames))
        rows = min(settings.decoder.max_batch, settings.encoder.export_windows)
        for n, positions in product(
            sorted({n for n in ROWS if n < rows} | {rows}),
            sorted({n for n in CONTEXTS if n < dims.n_audio_ctx} | {dims.n_audio_ctx}),
        ):
            for _ in range(1 + rounds):
                bench.run(n, positions, dims.n_audio_ctx)
                await asyncio.sleep(0)  # so that Ctrl-C is seen
            prompt_s, step_s = (bench.fastest[one, n, positions] for one in ("prompts", "step"))
            tell(
                f"{n} windows of {positions} positions: prompts in {1000 * prompt_s:.2f} ms, "
                f"a step in {1000 * step_s:.2f} ms"
            )
    layout = served_kv_layout(engines.checkpoint, settings, device)
    fields = {
        "name": name,
        "predicted": False,
        "source": f"splitscribe profile, the fastest of {rounds}, one worker alone; router "
        f"and audio assumed; load of the machine {os.getloadavg()[0]:.1f}",
        "machine": {"cores": usable_cores(), "device": device},
        "commit": build_id(),
        "model": engines.checkpoint.name,
        "shape": Shape.model_validate(dims, from_attributes=True),
        "kv_dtype": layout.dtype,
        "page_frames": layout.page_frames,
        "encoder": {
            "points": bench.points("encoder"),
            "max_batch": settings.encoder.max_batch or auto_batch(device),
            "export_windows": settings.encoder.export_windows,
        },
        "decoder": {
            "steps": bench.points("step"),
            "prefills": bench.points("prompts"),
            "max_batch": settings.decoder.max_batch,
            "kv_windows": settings.decoder.kv_windows,
            "steps_ahead": steps_ahead(device),
        },
        "handoff": _link(bench.points("read"), engines.importer.transport),
        "start_s": start_s,
    }
    return Profile.model_validate(fields)


@dataclass(slots=True)
class Bench:
    """fastest: seconds by kind of launch, size and positions."""

    engines: LocalEngines
    speech: Pcm
    fastest: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def run(self, n_windows: int, positions: int, whole: int) -> None:
        """Encode and decode `n_windows` at once, each cut to `positions` of the encoder."""
        encoder, decoder = self.engines.encoder, self.engines.decoder
        pcm = self.speech[: positions * SAMPLES_PER_POSITION]
        context = 0 if positions == whole else positions
        encoding = [
            encoder.submit(EncodeRequest("profile", n, 1, pcm, ANSWER_S, context=context))
            for n in range(n_windows)
        ]
        handles: list[CrossKVHandle] = []
        times: dict[int, list[float]] = {}
        for reply in (encoded.result(ANSWER_S) for encoded in encoding):
            self.engines.importer.accept(reply.handle)  # so that its lease does not run out
            handles.append(reply.handle)
            times.setdefault(reply.timings.batch_size, []).append(reply.timings.encode_s)
        for size, seconds in times.items():  # the mean, as a batch may wait behind another
            self._note("encoder", size, positions, sum(seconds) / len(seconds))
        before_s, options = decoder.stats().prefill_s, DecodeOptions(language="en")
        decoding = [
            decoder.submit(DecodeRequest("profile", n, 1, handle, options, ANSWER_S))
            for n, handle in enumerate(handles)
        ]
        for took in (decoded.result(ANSWER_S).timings for decoded in decoding):
            self._note("read", took.transfer_bytes, positions, took.transfer_s)
            # Includes the host's work between two steps.
            self._note("step", n_windows, positions, took.decode_s / max(1, took.steps))
        self._note("prompts", n_windows, positions, decoder.stats().prefill_s - before_s)

    def points(self, what: str) -> tuple[Point, ...]:
        return tuple(
            Point(size=size, positions=positions, seconds=seconds)
            for (kind, size, positions), seconds in sorted(self.fastest.items())
            if kind == what
        )

    def _note(self, what: str, size: int, positions: int, seconds: float) -> None:
        key = what, size, positions
        self.fastest[key] = min(seconds, self.fastest.get(key, seconds))


def _link(reads: tuple[Point, ...], transport: str) -> LinkProfile:
    """Fit latency and rate to the READs of the smallest and the largest window."""
    short, whole = min(reads, key=lambda one: one.size), max(reads, key=lambda one: one.size)
    rate = whole.size / whole.seconds
    if whole.seconds > short.seconds and whole.size > short.size:
        rate = (whole.size - short.size) / (whole.seconds - short.seconds)
    latency_s = max(LEAST_LATENCY_S, whole.seconds - whole.size / rate)
    return LinkProfile(transport=transport, latency_s=latency_s, bytes_per_s=rate)

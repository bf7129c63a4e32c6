"""The same requests for a real server and for the simulator, and what came of them.

The simulator's own load is drawn from its seed. For a real server each of its requests becomes an
upload of that length, with noise that no other upload has, and is sent at its time. Knows nothing
of what is compared; `benchmark.planning.simulation` does that.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmark.shared.clips import Clip
from benchmark.shared.openai_client import Client, Upload, form_fields
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import sample_path
from cluster.planning.profile import Profile
from cluster.planning.report import percentile as nearest
from cluster.planning.scenario import Load, Slo, arrivals, make_scenario
from cluster.planning.simulate import simulate

SLO = Slo(latency_s=2.0, per_audio_s=0.2)  # 3 s for a clip of 5 s
BEFORE_KILL_S, AFTER_KILL_S = 2.0, 15.0  # requests that came within are near a kill
PROBE_S, PROBES, USUAL_PROBES = 1.0, 40, 4  # seconds between two, after a kill, before it
PROBE_AUDIO_S = 3.0


@dataclass(frozen=True, slots=True)
class Seen:
    """Requests of one run: when each was sent, its audio, and what it took; seconds."""

    starts: list[float]
    audio: list[float]
    latencies: list[float]
    n_failed: int

    def figures(self, seconds: float) -> dict[str, float]:
        rows = zip(self.audio, self.latencies, strict=True)
        good = sum(latency <= SLO.limit_s(audio_s) for audio_s, latency in rows)
        return {
            "goodput": good / seconds,
            "p50": percentile(self.latencies, 50),
            "p95": percentile(self.latencies, 95),
        }

    def dip(self, kill_at_s: float) -> dict[str, float]:
        """Around a kill: the longest latency, and seconds waited beyond what was usual before."""
        rows = list(zip(self.starts, self.latencies, strict=True))
        usual_s = percentile([s for at_s, s in rows if at_s < kill_at_s - BEFORE_KILL_S], 50)
        low, high = kill_at_s - BEFORE_KILL_S, kill_at_s + AFTER_KILL_S
        near = [latency for at_s, latency in rows if low <= at_s <= high]
        return {
            "worst_s": max(near, default=0.0),
            "lost_s": sum(max(0.0, latency - usual_s) for latency in near),
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest one; 0 of none."""
    return nearest(sorted(values), percent) if values else 0.0


def real(url: str, load: Load, seed: int, on_begin: Callable[[], object] = lambda: None) -> Seen:
    """Send the requests of a load to a server, each at its time, and wait for all answers.

    on_begin: called at second 0 of the load, after what warms up the server and its client.
    """
    return asyncio.run(_send(url, load, seed, on_begin))


def probed(url: str, at_once: int, kill: Callable[[], object]) -> list[float]:
    """The slowest of some requests at once, each `PROBE_S`: the usual one, then from a kill on."""
    return asyncio.run(_probe(url, at_once, kill))


async def _probe(url: str, at_once: int, kill: Callable[[], object]) -> list[float]:
    uploads = Uploads(0, at_once * (USUAL_PROBES + PROBES))
    numbers = iter(range(at_once * (USUAL_PROBES + PROBES)))

    async def one(client: Client, number: int) -> float:
        sent_s = time.perf_counter()
        outcome = await client.send(uploads.make(number, PROBE_AUDIO_S))
        return float("inf") if outcome.failure else time.perf_counter() - sent_s

    async def group(client: Client) -> float:
        return max(await asyncio.gather(*(one(client, next(numbers)) for _ in range(at_once))))

    async with Client(url) as client:
        usual = [await group(client) for _ in range(USUAL_PROBES)]
        kill()
        began, groups = time.perf_counter(), []
        for number in range(PROBES):
            await asyncio.sleep(max(0.0, began + PROBE_S * number - time.perf_counter()))
            groups.append(asyncio.create_task(group(client)))
        return [min(usual), *await asyncio.gather(*groups)]


class Uploads:
    """Speech with noise, so that no two of them are the same audio."""

    def __init__(self, seed: int, most: int) -> None:
        self._pcm = Clip("long", sample_path("long")).pcm()
        rng = np.random.default_rng(seed)
        self._noise = rng.integers(-1, 2, len(self._pcm) + most, dtype=np.int16)
        self._fields = form_fields("whisper-1", "en", {})

    def make(self, number: int, audio_s: float) -> Upload:
        n_samples = min(len(self._pcm), round(audio_s * SAMPLE_RATE))
        noise = self._noise[number : number + n_samples]
        noisy = np.clip(self._pcm[:n_samples], -32_767, 32_766) + noise
        return Upload.of(wav_bytes(noisy), "audio.wav", self._fields)


async def _send(url: str, load: Load, seed: int, on_begin: Callable[[], object]) -> Seen:
    requests = list(arrivals(load, Random(seed)))
    uploads = Uploads(seed, len(requests))
    n_failed = 0
    rows: list[tuple[float, float, float]] = []

    async def one(client: Client, number: int, at_s: float, audio_s: float) -> None:
        nonlocal n_failed
        made = uploads.make(number, audio_s)
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        sent_s = time.perf_counter()
        outcome = await client.send(made)
        if outcome.failure:
            n_failed += 1
        else:
            rows.append((sent_s - began, audio_s, time.perf_counter() - sent_s))

    async with Client(url) as client:
        for number in range(2):
            await client.send(uploads.make(number, PROBE_AUDIO_S))
        on_begin()
        began = time.perf_counter()
        await asyncio.gather(*(one(client, r.number, r.at_s, r.audio_s) for r in requests))
    rows.sort()
    starts, audio, latencies = (list(column) for column in zip(*rows, strict=True))
    return Seen(starts, audio, latencies, n_failed)


def simulated(
    seen: Seen, workers: int, profile: Profile, kill_at_s: float | None = None
) -> tuple[Seen, float]:
    """The same arrivals in the simulator, and how long that took."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.jsonl")
        pairs = zip(seen.starts, seen.audio, strict=True)
        lines = (json.dumps({"at_s": at_s, "audio_s": audio_s}) for at_s, audio_s in pairs)
        trace.write_text("\n".join(lines))
        fields: dict[str, Any] = {
            "cluster": {"encoders": workers, "decoders": workers},
            "load": {"kind": "trace", "trace": trace, "seconds": max(seen.starts) + 1.0},
            "faults": [] if kill_at_s is None else [{"at_s": kill_at_s, "role": "encoder"}],
        }
        outcome = simulate(make_scenario(fields), profile)
    answers = outcome.records.answers["interactive"]
    rows = sorted(row for row in answers.rows() if row[2] < math.inf)
    starts, audio, latencies = (list(column) for column in zip(*rows, strict=True))
    told = Seen(starts, audio, latencies, answers.failures.total())
    return told, time.perf_counter() - began

"""How long people wait beside long work, and how fast that work goes, one load after another.

    python -m benchmark.serving.mixed [--only files archive] [--seconds 20] [--rounds 1]
    python -m benchmark.serving.mixed --splitscribe OLD/bin/splitscribe NEW/bin/splitscribe

- alone: clips of 5 s over HTTP, then live turns of 3 s over WebSocket, for `--seconds` each.
- hour: a file of an hour, alone.
- files: both beside files of ten minutes that are posted at once.
- speakers: the same where the files ask for speakers by voice.
- archive: clips beside `splitscribe batch` with all its files at once.
- ways: the archive's files by the command from its start to its end, and over HTTP, alone.

Clips are sent at a steady pace, however late the answers are. A turn's wait is from its commit to
its text. All audio is whole sentences of the bundled recordings, with noise of one step of 16 bits,
so that no server can answer from a cache. Several commands, of this checkout or of others, take
turns in each round. A ratio is to the same command alone. Refused and failed requests are counted
and have no time. If other programs took more than a tenth of a core, believe only what was measured
by turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from benchmark.serving.live import COMMIT, busy_s, configure, percentile, send
from benchmark.shared.clips import Clip
from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import cpu_info, versions
from benchmark.shared.openai_client import Client, Upload, send_all
from benchmark.shared.server import SPLITSCRIBE, BenchServer, serving
from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import SAMPLES, sample_path

PARTS = ("alone", "hour", "files", "speakers", "archive", "ways")
FORM = {"model": "whisper-1", "language": "en"}
CLIP_S, TURN_S = 5.0, 3.0
CLIP_EVERY_S = 0.7
SESSIONS = 3  # each speaks one turn after the other
WARM = 10  # clips
PAUSE_S = 0.3  # before and after each sentence
SETTLE_S = {"files": 3.0, "speakers": 3.0, "archive": 7.0}  # until the load is there
PATIENCE_S = 900.0
LARGE_UPLOADS = {"SPLITSCRIBE_ROUTER__MAX_UPLOAD_BYTES": str(1 << 27)}  # an hour is 115 MB

Waits = dict[str, list[float]]  # by kind


class Speech:
    def __init__(self) -> None:
        self._rng = np.random.default_rng()
        self._sentences: list[NDArray[np.int16]] = []
        for name in SAMPLES:
            pcm = np.clip(Clip(name, sample_path(name)).pcm(), -32_767, 32_766)
            for one in json.loads(sample_path(name).with_suffix(".json").read_text())["sentences"]:
                edges_s = one["start"] - PAUSE_S, one["end"] + PAUSE_S
                begin, end = (round(edge_s * SAMPLE_RATE) for edge_s in edges_s)
                self._sentences.append(pcm[begin:end])

    def take(self, seconds: float) -> NDArray[np.int16]:
        """Return int16 [n_samples]: sentences from a random one on, as many as fit, then noise."""
        taken = self._rng.integers(-1, 2, round(seconds * SAMPLE_RATE), dtype=np.int16)
        first = [i for i, one in enumerate(self._sentences) if len(one) <= len(taken)]
        n, i = 0, int(self._rng.choice(first))
        while n + len(one := self._sentences[i % len(self._sentences)]) <= len(taken):
            taken[n : n + len(one)] += one
            n, i = n + len(one), i + 1
        return taken

    def upload(self, seconds: float, **fields: str) -> Upload:
        return Upload.of(wav_bytes(self.take(seconds)), "speech.wav", FORM | fields)


@dataclass
class Figures:
    """A command's waits of requests by kind, and spans of whole loads, over all rounds."""

    waits_s: Waits = field(default_factory=lambda: defaultdict(list))
    spans_s: Waits = field(default_factory=lambda: defaultdict(list))
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    cores_of_others: list[float] = field(default_factory=list)


class Load:
    def __init__(
        self, server: BenchServer, command: str, figures: Figures, args: argparse.Namespace
    ) -> None:
        self._server, self._command, self._args = server, command, args
        self._figures, self._speech = figures, Speech()

    async def run(self, parts: Sequence[str]) -> None:
        async with Client(self._server.url, timeout_s=PATIENCE_S) as self._client:
            for seconds in (CLIP_S, 60.0):
                await send_all(self._client, [self._speech.upload(seconds)] * WARM, WARM)
            await self._turn("warm")
            del self._figures.waits_s["warm"]
            began, others_s = time.perf_counter(), self._others_s()
            for part in parts:
                print(f"{self._command}: {part}", flush=True)
                await getattr(self, f"_{part}")()
            wall_s = time.perf_counter() - began
            self._figures.cores_of_others.append((self._others_s() - others_s) / wall_s)

    def _others_s(self) -> float:
        """Return the CPU seconds of all programs but the server, this one and its commands."""
        own = psutil.Process().cpu_times()
        ours_s = own.user + own.system + own.children_user + own.children_system
        return busy_s() - ours_s - sum(self._server.cpu_s().values())

    async def _alone(self) -> None:
        pause = asyncio.sleep
        await self._beside(pause(self._args.seconds), 0.0, clips="clip alone")
        await self._beside(pause(self._args.seconds), 0.0, turns="turn alone")

    async def _hour(self) -> None:
        upload = await asyncio.to_thread(self._speech.upload, 3600.0)
        await self._timed("an hour's file", send_all(self._client, [upload], 1))

    async def _files(self, name: str = "files", **fields: str) -> None:
        seconds = 60 * self._args.minutes
        uploads = [self._speech.upload(seconds, **fields) for _ in range(self._args.files)]
        posted = self._timed(name, send_all(self._client, uploads, len(uploads)))
        names = {"clips": f"clip beside {name}", "turns": f"turn beside {name}"}
        await self._beside(posted, SETTLE_S[name], **names)

    async def _speakers(self) -> None:
        await self._files("speakers", diarize="true")

    async def _archive(self) -> None:
        with self._talks() as folder:
            ran = self._timed("archive beside clips", self._batch(folder))
            await self._beside(ran, SETTLE_S["archive"], clips="clip beside archive")

    async def _ways(self) -> None:
        with self._talks() as folder:
            await self._timed("archive alone", self._batch(folder))
        seconds, n_files = self._args.archive_seconds, self._args.archive_files
        uploads = [self._speech.upload(seconds) for _ in range(n_files)]
        await self._timed("the same over HTTP", send_all(self._client, uploads, n_files))

    @contextmanager
    def _talks(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as folder:
            for i in range(self._args.archive_files):
                pcm = self._speech.take(self._args.archive_seconds)
                Path(folder, f"{i}.wav").write_bytes(wav_bytes(pcm))
            yield Path(folder)

    async def _batch(self, folder: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            *(self._command, "batch", str(folder), "-o", str(folder / "texts"), "-f", "json"),
            *("--address", self._server.ray_address(), "--language", "en"),
            *("--files-at-once", str(self._args.archive_files)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        told, _ = await process.communicate()
        if process.returncode:
            raise SystemExit(f"splitscribe batch ended with {process.returncode}:\n{told.decode()}")

    async def _timed(self, name: str, work: Awaitable[Any]) -> None:
        began = time.perf_counter()
        outcomes = await work or ()
        if failed := [one for one in outcomes if one.failure]:
            raise SystemExit(f"{name}: {failed[0].failure} {failed[0].error}")
        self._figures.spans_s[name].append(time.perf_counter() - began)

    async def _beside(
        self, load: Coroutine[Any, Any, None], settle_s: float, clips: str = "", turns: str = ""
    ) -> None:
        """Send clips and turns as long as the load lasts, and wait for those begun by then."""
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(load)
            await asyncio.sleep(settle_s)
            if turns:
                for i in range(SESSIONS):
                    group.create_task(self._session(turns, i * TURN_S / SESSIONS, loading.done))
            while not loading.done():
                if clips:
                    upload = self._speech.upload(CLIP_S)
                    group.create_task(self._clip(clips, upload))
                await asyncio.sleep(CLIP_EVERY_S)

    async def _clip(self, kind: str, upload: Upload) -> None:
        outcome = await self._client.send(upload)
        if outcome.failure:
            self._figures.failed[kind] += 1
        else:
            self._figures.waits_s[kind].append(outcome.latency)

    async def _session(self, kind: str, delay_s: float, is_over: Callable[[], bool]) -> None:
        await asyncio.sleep(delay_s)
        while not is_over():
            try:
                await self._turn(kind)
            except (WebSocketException, OSError):
                self._figures.failed[kind] += 1
                await asyncio.sleep(1.0)

    async def _turn(self, kind: str) -> None:
        """Speak a turn in real time and commit it; its wait is from the commit to its text."""
        url = self._server.url.replace("http", "ws", 1) + "/v1/realtime?intent=transcription"
        async with connect(url, max_size=None) as socket:
            await configure(socket, FORM, detection=None)
            await send(socket, self._speech.take(TURN_S), time.perf_counter())
            began = time.perf_counter()
            await socket.send(COMMIT)
            async for message in socket:
                told = json.loads(message)["type"]
                if told == "error" or told.endswith("failed"):
                    raise ConnectionError(message)
                if told.endswith("transcription.completed"):
                    self._figures.waits_s[kind].append(time.perf_counter() - began)
                    return


def rows_of(figures: Figures) -> list[dict[str, Any]]:
    rows = []
    for kind, values in figures.waits_s.items():
        alone = figures.waits_s.get(f"{kind.partition(' ')[0]} alone")
        times_s = {f"p{share}_s": percentile(values, share) for share in (50, 95, 100)}
        beside = {"p95_to_alone": times_s["p95_s"] / percentile(alone, 95) if alone else None}
        counts = {"n": len(values), "failed": figures.failed[kind]}
        rows.append({"kind": kind, **counts, **times_s, **beside})
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--splitscribe", nargs="+", default=[SPLITSCRIBE], metavar="PATH", help="commands")
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--seconds", type=float, default=20.0, help="of clips, and of turns, alone")
    add("--rounds", type=int, default=1)
    add("--files", type=int, default=18)
    add("--minutes", type=float, default=10.0, help="of each file")
    add("--archive-files", type=int, default=24)
    add("--archive-seconds", type=float, default=120.0, help="of each of its files")
    args = parser.parse_args()
    found = {command: Figures() for command in args.splitscribe}
    for _ in range(args.rounds):
        for command, figures in found.items():
            flags = ("--served-model-name", "whisper-1", "--log-level", "WARNING")
            with serving(*flags, env=LARGE_UPLOADS, command=(command, "serve")) as server:
                load = Load(server, command, figures, args)
                asyncio.run(load.run([part for part in PARTS if part in args.only]))
            print(f"{command}: others took {figures.cores_of_others[-1]:.2f} cores")
    first = found[args.splitscribe[0]]
    for command, figures in found.items():
        print_table(rows_of(figures), command)
        for name, values in figures.spans_s.items():
            ratio = np.median(values) / np.median(first.spans_s[name])
            print(f"{name}: {np.median(values):.1f} s, {ratio:.3f} x the first command's")
    result = {command: vars(figures) for command, figures in found.items()}
    print_result("mixed", {**cpu_info(), **versions("torch"), **vars(args), "commands": result})


if __name__ == "__main__":
    main()

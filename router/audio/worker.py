"""The audio worker: a process that decodes uploads and cuts them into windows.

Started by `router.audio.pool`, with which it shares one socket. It holds many uploads at once and
works on them in steps of a few milliseconds, always on the one that has had the least processor
time: so a two-second clip never waits for a two-hour file. An upload whose consumer is behind
(no credit left) rests, and holds a few megabytes.

Anything may happen to this process while it reads hostile bytes; the router knows from the job
slot which upload it was on, blames that one alone, and gives the others to another worker.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cluster.errors import SplitscribeError, WorkerError
from router.audio.limits import AudioLimits
from router.audio.mel_peak import MelPeak
from router.audio.pieces import Pieces
from router.audio.protocol import JobSlot, Message, WorkerSocket, error_to_message
from router.audio.to_pcm import AudioFile
from router.audio.vad import SpeechDetector
from router.audio.windows import CutOptions, Window, WindowCutter

MAX_MESSAGE_CHARS = 500
FRAME_GRID_S = 0.01  # by which a pause may look shorter on the detector's grid
OLDEST_EVERY = 4  # steps; the share that short uploads cannot take from long ones


@dataclass(slots=True)
class Job:
    """One upload in work. `credit`: windows that the router will still take; `skip`: windows
    that it has from a worker that died; `busy_s`: processor time so far."""

    id: int
    steps: Iterator[Message | Window | None]
    credit: int
    skip: int = 0
    busy_s: float = 0.0
    last_step: int = 0


class AudioWorker:
    """Runs the uploads of one process."""

    def __init__(self, connection: WorkerSocket, slot: JobSlot, limits: AudioLimits) -> None:
        self._connection = connection
        self._slot = slot
        self._limits = limits
        self._detector = SpeechDetector()
        self._jobs: dict[int, Job] = {}
        self._step_count = 0

    def warm_up(self) -> None:
        """Pay for first uses before the first upload."""
        cutter = WindowCutter(self._detector)
        noise = np.random.default_rng(0).normal(0, 1000, 16_000).astype(np.int16)
        for _ in (*cutter.feed(noise), *cutter.finish()):
            pass

    def run(self) -> None:
        """Serve until the router closes the socket."""
        self._connection.send({"kind": "ready"})
        while True:
            job = self._next_job()
            try:
                messages = self._connection.receive(wait=job is None)
            except EOFError:
                return
            for message in messages:
                self._take(message)
            if messages:
                job = self._next_job()
            if job is not None:
                self._step(job)

    def _next_job(self) -> Job | None:
        """The upload that had the least time; now and then the one that waits longest."""
        ready = [job for job in self._jobs.values() if job.credit > 0]
        if self._step_count % OLDEST_EVERY == 0:
            return min(ready, key=lambda job: job.last_step, default=None)
        return min(ready, key=lambda job: job.busy_s, default=None)

    def _take(self, message: Message) -> None:
        if message["kind"] == "ping":
            self._connection.send({"kind": "pong"})
        elif message["kind"] == "open":
            steps = self._steps(Path(message["path"]), message["n_mels"], message["chunking"])
            job = Job(message["job"], steps, message["credit"], message["skip"])
            self._jobs[job.id] = job
        elif job := self._jobs.get(message["job"]):  # type: ignore[assignment]
            if message["kind"] == "credit":
                job.credit += message["windows"]
            elif message["kind"] == "cancel":
                self._drop(job)

    def _steps(
        self, path: Path, n_mels: int | None, chunking: Message | None
    ) -> Iterator[Message | Window | None]:
        if n_mels is None:
            return transcode(path, self._limits, self._detector, chunking)
        return transcode_whole(path, self._limits, n_mels)

    def _step(self, job: Job) -> None:
        self._step_count += 1
        job.last_step = self._step_count
        self._slot.set(job.id)
        began_s = time.thread_time()
        failure: SplitscribeError | None = None
        try:
            result = next(job.steps)
        except SplitscribeError as error:
            failure = error
        except MemoryError:
            # What the allocator keeps would fail others: leave, and be replaced.
            self._connection.send({"kind": "memory", "job": job.id})
            sys.exit(0)
        except Exception as error:
            failure = WorkerError(f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS])
        job.busy_s += time.thread_time() - began_s
        self._slot.clear()
        if failure is None and job.busy_s > self._limits.max_busy_s:
            failure = self._limits.too_slow()
        if failure is not None:
            self._fail(job, failure)
        else:
            self._report(job, result)

    def _report(self, job: Job, result: Message | Window | None) -> None:
        if isinstance(result, Window):
            if job.skip > 0:
                job.skip -= 1
                return
            job.credit -= 1
            self._connection.send(
                {
                    "kind": "window",
                    "job": job.id,
                    "index": result.index,
                    "start_sample": result.start_sample,
                    "is_faint": result.is_faint,
                    "speech": result.speech,
                },
                result.pcm.data.cast("B"),
            )
        elif result is not None:
            self._connection.send(result | {"job": job.id, "busy_s": job.busy_s})
            if result["kind"] == "done":
                self._drop(job)

    def _fail(self, job: Job, error: SplitscribeError) -> None:
        self._connection.send({"kind": "failed", "job": job.id} | error_to_message(error))
        self._drop(job)

    def _drop(self, job: Job) -> None:
        del self._jobs[job.id]
        job.steps.close()  # type: ignore[attr-defined]


def transcode(
    path: Path, limits: AudioLimits, detector: SpeechDetector, chunking: Message | None = None
) -> Iterator[Message | Window | None]:
    """Decode and cut one upload, step by step: "opened", windows, "done"; None is a step between.

    chunking: a client's wishes for the cuts, the fields of `router.api.params.Chunking`.

    Raises:
        SplitscribeError: what `AudioFile` raises.
    """
    with AudioFile(path, limits) as file:
        yield {"kind": "opened", "expected_s": file.declared_s}
        cutter = make_cutter(detector, chunking)
        for pcm in file.blocks():
            yield from cutter.feed(pcm)
            yield None
        yield from cutter.finish()
        yield {"kind": "done", "n_samples": cutter.n_samples}


def make_cutter(detector: SpeechDetector, chunking: Message | None) -> WindowCutter:
    """Our own rules, bent to a client's wishes where there are any.

    A pause must last `silence_duration_ms` for a cut, and `prefix_padding_ms` of a longer silence
    stay in front of speech.
    """
    if chunking is None:
        return WindowCutter(detector)
    usual, threshold = CutOptions(), chunking["threshold"]
    padding_s = chunking["prefix_padding_ms"] / 1000
    pause_s = chunking["silence_duration_ms"] / 1000
    options = replace(
        usual,
        pad_before_s=padding_s,
        max_lead_s=padding_s + (usual.max_lead_s - usual.pad_before_s),
        min_pause_s=max(0.0, pause_s - FRAME_GRID_S),
    )
    vad = replace(detector.options, threshold=threshold, release=threshold / 3)
    return WindowCutter(detector, options, vad=vad)


def transcode_whole(
    path: Path, limits: AudioLimits, n_mels: int
) -> Iterator[Message | Window | None]:
    """Decode one upload, step by step, in pieces of 30 s; else as `transcode`.

    Raises:
        SplitscribeError: what `AudioFile` raises.
    """
    with AudioFile(path, limits) as file:
        yield {"kind": "opened", "expected_s": file.declared_s}
        peak = MelPeak(n_mels)
        pieces = Pieces()
        for pcm in file.blocks():
            peak.feed(pcm)
            yield from pieces.feed(pcm)
            yield None
        yield from pieces.finish()
        yield {"kind": "done", "n_samples": pieces.n_samples, "log_max": peak.finish()}


def limit_memory(extra_bytes: int) -> None:
    """Let this process allocate so much beyond what it holds now; no core dumps."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[5])  # data and stack
        limit = pages * resource.getpagesize() + extra_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def main() -> None:
    """Arguments: the socket's descriptor, the job slot's, the limits as JSON."""
    socket_fd, slot_fd, limits_json = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router closes the socket instead
    limits = AudioLimits(**json.loads(limits_json))
    connection = WorkerSocket(socket.socket(fileno=socket_fd))
    worker = AudioWorker(connection, JobSlot(slot_fd), limits)
    worker.warm_up()
    limit_memory(limits.memory_bytes)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the router is gone
        worker.run()


if __name__ == "__main__":
    main()

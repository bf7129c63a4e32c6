"""The router's way from an upload to windows: a pool of audio workers.

    async with pool.open(path, request_id=..., timeout_s=...) as stream:
        async for window in stream:
            ...

Stands at the start of the pipeline. Each worker is a process of its own (`router.audio_worker`),
because decoding hostile files may crash, hang or eat memory: one that does is replaced alone, the
upload it was on gets the error, and its other uploads go on in another worker, after the windows
that were already sent. Knows processes, sockets and who waits for what, nothing of audio.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

import numpy as np

from cluster.errors import (
    ConfigurationError,
    DeadlineExceededError,
    InvalidAudioError,
    SplitscribeError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.messages import SAMPLE_RATE, WINDOW_SAMPLES
from cluster.settings import RouterSettings
from router.audio_limits import AudioLimits
from router.audio_protocol import PREFIX, JobSlot, Message, error_from_message, pack
from router.windows import Window

__all__ = ["AudioPool", "AudioStream", "Window"]

logger = logging.getLogger(__name__)

CREDIT = 2  # windows of one upload that may wait in the router for their consumer
MAX_JOBS = 64  # uploads in one worker; more wait in the router
MAX_MOVES = 3  # times an upload may lose its worker without fault
MAX_MESSAGE_BYTES = 65_536
READY_TIMEOUT_S = 60.0
FIRST_RESTART_S, LAST_RESTART_S = 0.1, 10.0  # waits between failed starts of a worker
EXIT_TIMEOUT_S = 2.0
CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
)
# The child finds modules exactly where its parent does, whatever folder it starts in.
BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1'); "
    "from router.audio_worker import main; main()"
)


class AudioStream:
    """One upload's windows, in order, as they are found.

    expected_s: the length that the container states, or None; it may be wrong.
    duration_s, decode_s: the audio's length, and the processor time that decoding and cutting
        took; both are final when the iteration has ended.
    """

    def __init__(self, job: int, path: Path, request_id: str) -> None:
        self.request_id = request_id
        self.expected_s: float | None = None
        self.duration_s = 0.0
        self.decode_s = 0.0
        self._job = job
        self._path = path
        self._worker: _Worker | None = None
        self._waiting: deque[Window] = deque()
        self._received = 0  # windows, in all
        self._moves = 0
        self._opened = False
        self._finished = False
        self._error: SplitscribeError | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Window:
        """The next window.

        Raises:
            SplitscribeError: the upload cannot be decoded, or its worker died on it.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._waiting:
                break
            if self._finished:
                raise StopAsyncIteration
            await self._change()
        window = self._waiting.popleft()
        if self._worker is not None and not self._finished:
            self._worker.send({"kind": "credit", "job": self._job, "windows": 1})
        return window

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _until_open(self) -> None:
        while not self._opened:
            if self._error is not None:
                raise self._error
            await self._change()
        if self._error is not None:
            raise self._error

    @property
    def _ended(self) -> bool:
        return self._finished or self._error is not None

    @property
    def _wants_work(self) -> bool:
        return not self._ended and len(self._waiting) < CREDIT

    def _take(self, message: Message, pcm: bytes) -> None:
        kind = message["kind"]
        if kind == "opened":
            self._opened = True
            self.expected_s = message["expected_s"]
        elif kind == "window":
            samples = np.frombuffer(pcm, np.int16)
            self._waiting.append(Window(message["index"], message["start_sample"], samples))
            self._received += 1
        elif kind == "done":
            self._finished = True
            self.duration_s = message["n_samples"] / SAMPLE_RATE
        elif kind == "failed":
            self._error = error_from_message(message)
        self.decode_s = message.get("busy_s", self.decode_s)
        self._changed.set()

    def _fail(self, error: SplitscribeError) -> None:
        if not self._ended:
            self._error = error
            self._changed.set()


class _Worker:
    """The router's end of one audio worker."""

    def __init__(self, process: subprocess.Popen[bytes], slot: JobSlot) -> None:
        self.process = process
        self.slot = slot
        self.streams: dict[int, AudioStream] = {}
        self.ready = asyncio.Event()
        self.alive = True
        self.timed_out = False
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def spawn(cls, limits: AudioLimits) -> _Worker:
        ours, theirs = socket.socketpair()
        slot_fd = JobSlot.make_file()
        command = [sys.executable, "-c", BOOT, json.dumps([str(entry) for entry in sys.path])]
        command += [str(theirs.fileno()), str(slot_fd), json.dumps(dataclasses.asdict(limits))]
        try:
            process = await asyncio.to_thread(
                subprocess.Popen,
                command,
                pass_fds=(theirs.fileno(), slot_fd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            worker = cls(process, JobSlot(slot_fd))
        finally:
            theirs.close()
            os.close(slot_fd)
        worker._reader, worker._writer = await asyncio.open_unix_connection(
            sock=ours, limit=2 * WINDOW_SAMPLES
        )
        return worker

    @property
    def load(self) -> tuple[int, int]:
        return sum(s._wants_work for s in self.streams.values()), len(self.streams)

    def send(self, message: Message) -> None:
        if self.alive:
            self._writer.write(b"".join(pack(message)))

    async def receive(self) -> tuple[Message, bytes]:
        """The next message and its PCM.

        Raises:
            EOFError: the worker is gone, or sent something that no worker sends.
        """
        try:
            prefix = await self._reader.readexactly(PREFIX.size)
            length, pcm_bytes = PREFIX.unpack(prefix)
            if length > MAX_MESSAGE_BYTES or pcm_bytes > 2 * WINDOW_SAMPLES:
                raise EOFError
            message: Message = json.loads(await self._reader.readexactly(length))
            return message, await self._reader.readexactly(pcm_bytes) if pcm_bytes else b""
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise EOFError from error

    def take_up(self, stream: AudioStream) -> None:
        self.streams[stream._job] = stream
        stream._worker = self
        self.send(
            {
                "kind": "open",
                "job": stream._job,
                "path": str(stream._path),
                "credit": CREDIT - len(stream._waiting),
                "skip": stream._received,
            }
        )

    def drop(self, stream: AudioStream) -> None:
        if self.streams.pop(stream._job, None) and not stream._ended:
            self.send({"kind": "cancel", "job": stream._job})
        stream._worker = None

    async def bury(self, patience_s: float = 0.0) -> None:
        """Close the socket, which ends the process; kill it if it does not end in time."""
        self.alive = False
        self._writer.close()
        try:
            await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


class AudioPool:
    """A warm pool of audio workers. Belongs to one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._limits = AudioLimits(
            max_upload_bytes=settings.max_upload_bytes,
            max_audio_s=settings.max_audio_s,
            min_audio_s=settings.min_audio_s,
            max_busy_s=settings.audio_timeout_s,
            memory_bytes=settings.audio_memory_mb * 2**20,
        )
        self._jobs = itertools.count(1)
        self._workers: list[_Worker] = []
        self._waiting: deque[AudioStream] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def start(self) -> None:
        """Start every worker and wait until each is ready.

        Raises:
            ConfigurationError: a worker does not start; its standard error says why.
        """
        keepers = [self._keep_worker() for _ in range(self._settings.audio_workers)]
        self._tasks = [asyncio.create_task(task) for task in (*keepers, self._watch())]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while sum(w.ready.is_set() for w in self._workers) < len(keepers):
                    await asyncio.wait(self._tasks, timeout=0.01)
                    for task in self._tasks:
                        if task.done():
                            task.result()
        except TimeoutError as error:
            await self.close()
            raise ConfigurationError("the audio workers did not start in time") from error
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End all workers; uploads still open fail."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        streams = [*self._waiting, *(s for w in self._workers for s in w.streams.values())]
        for stream in streams:
            stream._fail(WorkerDrainingError("the server is shutting down"))
        await asyncio.gather(*(worker.bury(EXIT_TIMEOUT_S) for worker in self._workers))
        self._workers.clear()

    @contextlib.asynccontextmanager
    async def open(
        self, path: Path, *, request_id: str, timeout_s: float
    ) -> AsyncIterator[AudioStream]:
        """Begin to decode the file at `path`, which must stay there until the block is left.

        Leaving the block, also by cancellation, ends the work on it.

        timeout_s: time to open it, with the wait for a worker.

        Raises:
            SplitscribeError: of the 4xx kind if it is not audio; WorkerError if its worker died
                on it; DeadlineExceededError if it could not be opened in time.
        """
        stream = AudioStream(next(self._jobs), path, request_id)
        if self._closed:
            raise WorkerDrainingError("the server is shutting down")
        self._waiting.append(stream)
        self._assign()
        expiry = asyncio.get_running_loop().call_later(
            self._settings.max_deadline_s,
            stream._fail,
            DeadlineExceededError("the request's time ran out before its audio was read"),
        )
        try:
            try:
                await asyncio.wait_for(stream._until_open(), timeout_s)
            except TimeoutError as error:
                raise DeadlineExceededError("no audio worker was free in time") from error
            yield stream
        finally:
            expiry.cancel()
            self._release(stream)

    def _assign(self) -> None:
        """Give waiting uploads to the least busy workers."""
        while self._waiting:
            able = [w for w in self._workers if w.ready.is_set() and len(w.streams) < MAX_JOBS]
            if not able:
                return
            stream = self._waiting.popleft()
            if not stream._ended:
                min(able, key=lambda worker: worker.load).take_up(stream)

    def _release(self, stream: AudioStream) -> None:
        if stream._worker is not None:
            stream._worker.drop(stream)
        with contextlib.suppress(ValueError):
            self._waiting.remove(stream)
        stream._fail(WorkerDrainingError("the upload was closed"))
        self._assign()

    # ------------------------------------------------------------------------- the workers

    async def _keep_worker(self) -> None:
        """Keep one worker running: start it, listen to it, replace it when it dies."""
        pause_s, ever_ready = FIRST_RESTART_S, False
        while True:
            problem = await self._run_worker()
            if problem is None:
                pause_s, ever_ready = FIRST_RESTART_S, True
                continue
            if not ever_ready:
                raise ConfigurationError(f"an audio worker does not start: {problem}")
            logger.error("an audio worker does not start: %s; next try in %g s", problem, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RESTART_S)

    async def _run_worker(self) -> str | None:
        """One worker's life. Returns None, or what kept it from getting ready."""
        try:
            worker = await _Worker.spawn(self._limits)
        except OSError as error:
            return str(error)
        self._workers.append(worker)
        await self._listen(worker)
        self._workers.remove(worker)
        await worker.bury(EXIT_TIMEOUT_S)
        self._mourn(worker)
        if worker.ready.is_set():
            return None
        return f"exit code {worker.process.returncode}; its error output says why"

    async def _listen(self, worker: _Worker) -> None:
        """Hand a worker's messages to their streams until it is gone."""
        while True:
            try:
                message, pcm = await worker.receive()
            except EOFError:
                return
            if message["kind"] == "ready":
                worker.ready.set()
                self._assign()
            elif (stream := worker.streams.get(message["job"])) is None:
                continue  # cancelled meanwhile
            elif message["kind"] == "memory":
                stream._fail(self._limits.too_big())
            else:
                stream._take(message, pcm)

    def _mourn(self, worker: _Worker) -> None:
        """Blame the upload that a dead worker was on, and move its other uploads."""
        code = worker.process.returncode
        blamed, _ = worker.slot.get()
        worker.slot.close()
        logger.warning("an audio worker ended (exit code %s) and is replaced", code)
        for stream in worker.streams.values():
            stream._worker = None
            stream._moves += 1
            if stream._job == blamed or stream._moves > MAX_MOVES:
                error = self._blame(worker, code)
                logger.warning("request %s: %s", stream.request_id, error.message)
                stream._fail(error)
            elif not stream._ended:
                self._waiting.appendleft(stream)
        worker.streams.clear()
        self._assign()

    def _blame(self, worker: _Worker, code: int) -> SplitscribeError:
        if worker.timed_out:
            return self._limits.too_slow()
        if -code in CRASHES:
            return InvalidAudioError("The audio crashed its decoder.", param="file")
        return WorkerError(f"the audio worker died on this upload (exit code {code})")

    async def _watch(self) -> None:
        """Kill a worker that has been inside one step for longer than an upload may take."""
        limit_s = self._settings.audio_timeout_s
        while True:
            await asyncio.sleep(min(1.0, limit_s / 4))
            for worker in self._workers:
                job, busy_s = worker.slot.get()
                if job and busy_s > limit_s:
                    worker.timed_out = True
                    worker.process.kill()

"""The router's pool of audio workers, which decode uploads and cut them into windows.

Workers are processes (`router.audio.worker`), because hostile files may crash, hang or bloat their
decoder. A dead worker is replaced, its current upload fails, and its other uploads continue in
another worker behind the windows already sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

from cluster.common.clock import SYSTEM_CLOCK
from cluster.common.cores import audio_workers_of
from cluster.common.errors import (
    ConfigurationError,
    InvalidAudioError,
    RateLimitError,
    SplitscribeError,
    WorkerDrainingError,
    WorkerError,
)
from cluster.common.settings import RouterSettings, SpeakerSettings
from router.api.params import Chunking
from router.audio.protocol import (
    AudioLimits,
    OpenUpload,
    Ready,
    Report,
    SpeakerSearch,
    UploadReport,
)
from router.audio.stream import AudioStream, WholeAudio
from router.audio.worker_handle import AudioProcess
from router.interface import RequestContext

logger = logging.getLogger(__name__)

MAX_UPLOADS = 64  # per worker; more wait in the router
MAX_LONG = 48  # of these: leaves room for clips beside long files
LONG_BYTES = 1_000_000  # 30 s of WAV
LOOK_S = 1.0  # between two checks of the workers
STALLED_LOOKS = 5  # in a row without progress before a worker is killed
MOST_ENDED, ENDED_S = 10, 300.0  # workers that a client's uploads may end in this time
MAX_MOVES = 3  # times an upload may lose its worker while the culprit is unknown
READY_TIMEOUT_S = 60.0
FIRST_RESTART_S, LAST_RESTART_S = 0.1, 10.0  # between failed starts of a worker
EXIT_TIMEOUT_S = 2.0
CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP)
)


class AudioPool:
    """Belongs to one event loop. Adds a worker (60 MB) when there are more uploads than workers."""

    def __init__(
        self,
        settings: RouterSettings,
        *,
        speakers: SpeakerSettings | None = None,
        when_idle: bool = False,
    ) -> None:
        self._limits = AudioLimits(
            max_upload_bytes=settings.max_upload_bytes,
            max_audio_s=settings.max_audio_s,
            min_audio_s=settings.min_audio_s,
            max_busy_s=settings.audio_timeout_s,
            memory_bytes=settings.audio_memory_mb * 2**20,
            when_idle=when_idle,
            speaker_model=speakers.model if speakers else None,
        )
        self.known_limit = speakers.known_limit if speakers else 0
        self.threshold = (speakers and speakers.threshold) or 0.0
        self._upload_ids = itertools.count(1)
        self._workers: list[AudioProcess] = []
        self._waiting: deque[AudioStream] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._n_workers = audio_workers_of(settings.audio_workers)
        self._n_reserve = self._n_workers - 1  # workers not started yet
        self._closed = False
        self._ended_s: dict[bytes, list[float]] = {}  # when uploads ended workers, by client

    async def start(self) -> None:
        """Wait until the first worker is ready. Raises ConfigurationError."""
        self._tasks = [asyncio.create_task(task) for task in (self._keep_worker(), self._watch())]
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                while not any(w.is_able for w in self._workers):
                    done, _ = await asyncio.wait(self._tasks, timeout=0.01)
                    for task in done:
                        task.result()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise ConfigurationError("the audio workers did not start in time") from error
            raise

    async def close(self) -> None:
        """End all workers, even if cancelled. Open uploads fail."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            streams = [*self._waiting, *(s for w in self._workers for s in w.streams.values())]
            for stream in streams:
                stream.fail(WorkerDrainingError("the server is shutting down"))
            ends = [worker.end(EXIT_TIMEOUT_S) for worker in self._workers]
            self._workers.clear()
            await asyncio.gather(*ends)

    @contextlib.asynccontextmanager
    async def open(
        self,
        path: Path,
        context: RequestContext,
        *,
        chunking: Chunking | None = None,
        channel: int | None = None,
    ) -> AsyncIterator[AudioStream]:
        """Decode the file at `path`, which must exist until the block is left. Raises WorkerError
        if its worker died on it, InvalidRequestError, PayloadTooLargeError, RateLimitError or
        DeadlineExceededError.
        """
        upload = OpenUpload(next(self._upload_ids), str(path), chunking=chunking, channel=channel)
        async with self._opened(AudioStream(upload, context)) as stream:
            yield stream

    @property
    def tells_voices_apart(self) -> bool:
        return self._limits.speaker_model is not None

    async def survey(
        self, path: Path, context: RequestContext, speakers: SpeakerSearch | None = None
    ) -> AudioStream:
        """Decode a file for its length and its channels, or `speakers`, found in `result`. Raises
        as `open`, InvalidRequestError for a single channel, and InvalidAudioError for a reference.
        """
        survey = speakers is None
        upload = OpenUpload(next(self._upload_ids), str(path), survey=survey, speakers=speakers)
        async with self._opened(AudioStream(upload, context)) as stream:
            async for _ in stream:
                raise AssertionError("a survey has no windows")
        return stream

    @contextlib.asynccontextmanager
    async def open_whole(
        self, path: Path, context: RequestContext, *, n_mels: int, channel: int | None = None
    ) -> AsyncIterator[WholeAudio]:
        """As `open`, to read the audio in any order. n_mels: mel bins of the peak to find."""
        upload = OpenUpload(next(self._upload_ids), str(path), n_mels=n_mels, channel=channel)
        with contextlib.closing(WholeAudio(upload, context)) as audio:
            async with self._opened(audio):
                yield audio

    @contextlib.asynccontextmanager
    async def _opened(self, stream: AudioStream) -> AsyncIterator[AudioStream]:
        if self._closed:
            raise WorkerDrainingError("the server is shutting down")
        self._check_budget(stream.context.client)
        with contextlib.suppress(OSError):  # the worker reports it
            stream.is_long = stream.path.stat().st_size > LONG_BYTES
        self._waiting.append(stream)
        self._assign()
        try:
            await stream.until_open()
            yield stream
        finally:
            self._release(stream)

    def _assign(self) -> None:
        """Give waiting uploads, in order, to the least busy workers, and start another if needed.
        Clips pass long files that wait for `MAX_LONG`.
        """
        takes_long = True
        for stream in tuple(self._waiting):
            able = [w for w in self._workers if w.is_able and len(w.streams) < MAX_UPLOADS]
            if not able:
                break
            if stream.is_long:
                able = [w for w in able if takes_long and w.n_long < MAX_LONG]
                takes_long = bool(able)
            if able:
                self._waiting.remove(stream)
                if not stream.ended:
                    others = [w for w in able if w.hears(stream)]
                    min(others or able, key=lambda worker: worker.load).add(stream)
        n_uploads = len(self._waiting) + sum(len(worker.streams) for worker in self._workers)
        n_started = self._n_workers - self._n_reserve
        n_able = sum(worker.is_able for worker in self._workers)
        if self._n_reserve and n_able == n_started < n_uploads:  # one at a time
            self._n_reserve -= 1
            self._tasks.append(asyncio.create_task(self._keep_worker(ever_ready=True)))

    def _check_budget(self, client: bytes) -> None:
        now_s = SYSTEM_CLOCK.monotonic()
        recent = [at_s for at_s in self._ended_s.pop(client, ()) if now_s - at_s < ENDED_S]
        if recent:
            self._ended_s[client] = recent
        if len(recent) >= MOST_ENDED:
            raise RateLimitError(
                f"{len(recent)} decoding processes ended while they decoded audio of this client. "
                "Its audio is refused for a while.",
                retry_after_s=recent[-MOST_ENDED] + ENDED_S - now_s,
            )

    def _release(self, stream: AudioStream) -> None:
        for worker in self._workers:
            worker.remove(stream)
        with contextlib.suppress(ValueError):
            self._waiting.remove(stream)
        stream.fail(WorkerDrainingError("the upload was closed"))
        self._assign()

    # ------------------------------------------------------------------------- the workers

    async def _keep_worker(self, *, ever_ready: bool = False) -> None:
        """Raises ConfigurationError if the worker does not start and never was ready."""
        pause_s = FIRST_RESTART_S
        while True:
            problem = await self._run_worker()
            if problem is None:
                pause_s, ever_ready = FIRST_RESTART_S, True
                continue
            if not ever_ready:
                raise ConfigurationError(f"an audio worker does not start: {problem}")
            logger.error("an audio worker does not start: %s; next try in %g s", problem, pause_s)
            await SYSTEM_CLOCK.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RESTART_S)

    async def _run_worker(self) -> str | None:
        """Run a worker until it ends. Returns why it never got ready, if so."""
        try:
            worker = AudioProcess(self._limits)
            await worker.connect()
        except OSError as error:
            return str(error)
        self._workers.append(worker)
        await self._listen(worker)
        await worker.end(EXIT_TIMEOUT_S)  # if this is cancelled, `close` ends the worker
        self._workers.remove(worker)
        self._reassign(worker)
        if worker.ready.is_set():
            return None
        return f"exit code {worker.process.returncode}; its error output says why"

    async def _listen(self, worker: AudioProcess) -> None:
        while True:
            try:
                self._handle(worker, *await worker.receive())
            except EOFError:
                return
            except ValueError as error:
                # A worker taken over by an upload may send anything. Only that worker ends.
                logger.warning("an audio worker sent an invalid message (%s)", type(error).__name__)
                return

    def _handle(self, worker: AudioProcess, report: Report, pcm: bytes) -> None:
        match report:
            case Ready():
                worker.ready.set()
                self._assign()
            case UploadReport(upload_id) if upload_id in worker.streams:  # else it was cancelled
                stream = worker.streams[upload_id]
                stream.take(report, pcm)
                if stream.ended:
                    self._release(stream)

    def _reassign(self, worker: AudioProcess) -> None:
        """Fail the upload that a dead worker was on, and give its others to other workers."""
        code = worker.process.returncode
        blamed = worker.slot.get()
        worker.slot.close()
        logger.warning("an audio worker ended (exit code %s) and is replaced", code)
        culprit = worker.streams.get(blamed, worker.left)
        is_known = culprit is not None and culprit.upload_id == blamed and not worker.stalled
        if culprit is not None and is_known and (client := culprit.context.client):
            self._ended_s.setdefault(client, []).append(SYSTEM_CLOCK.monotonic())
        error = self._blame(worker, code)
        for stream in worker.streams.values():
            stream.add_credit = None
            stream.moves += blamed in (0, stream.upload_id)
            if stream.ended:
                continue
            is_to_blame = stream.upload_id == blamed and not worker.stalled
            if stream.is_search and isinstance(error, WorkerError):
                is_to_blame = False
            if is_to_blame or stream.moves > MAX_MOVES:
                logger.warning(error.message, extra={"request_id": stream.context.request_id})
                stream.fail(error)
            else:
                self._waiting.appendleft(stream)
        worker.streams.clear()
        self._assign()

    def _blame(self, worker: AudioProcess, code: int) -> SplitscribeError:
        if -code == signal.SIGPROF:  # the timer of a step
            return self._limits.too_slow()
        if -code in CRASHES:
            return InvalidAudioError("The audio crashed its decoder.", param="file")
        return WorkerError(f"the audio worker died on this upload (exit code {code})")

    async def _watch(self) -> None:
        """Kill workers that stand still. A step that takes too long is ended by its own timer."""
        while True:
            await SYSTEM_CLOCK.sleep(LOOK_S)
            for worker in self._workers:
                if worker.is_able and worker.n_still() >= STALLED_LOOKS:
                    logger.error("an audio worker makes no progress and is killed")
                    worker.stalled = True
                    worker.process.kill()

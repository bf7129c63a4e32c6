"""The router's end of one audio worker: starts the process, talks to it, and buries it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, InvalidStateError

from cluster.messages import WINDOW_SAMPLES
from router.audio.limits import AudioLimits
from router.audio.protocol import PREFIX, JobSlot, Message, pack
from router.audio.stream import CREDIT, AudioStream

MAX_MESSAGE_BYTES = 65_536
# The child finds modules exactly where its parent does, whatever folder it starts in.
BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1'); "
    "from router.audio.worker import main; main()"
)


class AudioProcess:
    """One audio worker: the process, its socket, and the streams that it works on."""

    def __init__(self, process: subprocess.Popen[bytes], slot: JobSlot) -> None:
        self.process = process
        self.slot = slot
        self.streams: dict[int, AudioStream] = {}
        self.ready = asyncio.Event()
        self.alive = True
        self.timed_out = False
        self.stalled = False
        self._n_silent = 0  # looks at it in a row at which it had neither answered nor worked
        self._is_asked = False
        self._cpu_ticks = 0
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def spawn(cls, limits: AudioLimits) -> AudioProcess:
        """Start a worker. Cancelled at any point, it leaves no process and no socket.

        Raises:
            OSError: the system gives no process, socket or shared page.
        """
        loop = asyncio.get_running_loop()
        started: Future[Started] = Future()
        loop.run_in_executor(None, _start_for, started, limits)
        try:
            process, slot, ours = await asyncio.wrap_future(started)
        except asyncio.CancelledError:
            # Either the thread sees that nobody waits, or it was done before: then it falls to us.
            if not started.cancel() and started.exception() is None:
                loop.run_in_executor(None, _discard, *started.result())
            raise
        worker = cls(process, slot)
        try:
            worker._reader, worker._writer = await asyncio.open_unix_connection(
                sock=ours, limit=2 * WINDOW_SAMPLES
            )
        except BaseException:
            loop.run_in_executor(None, _discard, process, slot, ours)
            raise
        return worker

    @property
    def is_able(self) -> bool:
        """It takes uploads."""
        return self.alive and self.ready.is_set()

    @property
    def load(self) -> tuple[int, int]:
        return sum(s.wants_work for s in self.streams.values()), len(self.streams)

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
            self._is_asked = False
            return message, await self._reader.readexactly(pcm_bytes) if pcm_bytes else b""
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise EOFError from error

    def n_silent(self) -> int:
        """Ask for a sign of life; returns at how many such looks in a row there was none.

        A worker inside a long step does not answer, but takes processor time.
        """
        ticks = _cpu_ticks(self.process.pid)
        if self._is_asked and ticks == self._cpu_ticks:
            self._n_silent += 1
        else:
            self._n_silent = 0
        self._cpu_ticks = ticks
        if not self._is_asked:
            self._is_asked = True
            self.send({"kind": "ping"})
        return self._n_silent

    def take_up(self, stream: AudioStream) -> None:
        self.streams[stream.job] = stream
        stream.worker = self
        self.send(
            {
                "kind": "open",
                "job": stream.job,
                "path": str(stream.path),
                "credit": CREDIT - len(stream.waiting),
                "skip": stream.received,
                "n_mels": stream.n_mels,
                "chunking": stream.chunking and dataclasses.asdict(stream.chunking),
            }
        )

    def drop(self, stream: AudioStream) -> None:
        if self.streams.pop(stream.job, None) and not stream.finished:
            self.send({"kind": "cancel", "job": stream.job})
        stream.worker = None

    def bury(self, patience_s: float = 0.0) -> asyncio.Future[None]:
        """Close the socket, which ends the process; kill it if it does not end in time.

        Whether anybody awaits the end or not, it comes: a thread sees to it. May be called again.
        """
        self.alive = False
        self._writer.close()
        loop = asyncio.get_running_loop()
        return asyncio.shield(loop.run_in_executor(None, _end, self.process, patience_s))


def _cpu_ticks(pid: int) -> int:
    """Processor time of a process so far, in the kernel's ticks.

    Where the kernel does not tell, what never stands still: a frozen worker is not found there.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return time.monotonic_ns()
    return int(fields[11]) + int(fields[12])  # utime and stime


Started = tuple[subprocess.Popen[bytes], JobSlot, socket.socket]


def _start_for(started: Future[Started], limits: AudioLimits) -> None:
    """Start a worker for whoever waits for `started`; end it again if nobody does."""
    try:
        parts = _start(limits)
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            started.set_exception(error)
        return
    try:
        started.set_result(parts)
    except InvalidStateError:  # cancelled meanwhile
        _discard(*parts)


def _start(limits: AudioLimits) -> Started:
    """Fork a worker; returns it with its job slot and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.enter_context(ours)
        slot_fd = JobSlot.make_file()
        try:
            slot = JobSlot(slot_fd)
            undo.callback(slot.close)
            command = [sys.executable, "-c", BOOT, json.dumps([str(entry) for entry in sys.path])]
            command += [str(theirs.fileno()), str(slot_fd), json.dumps(dataclasses.asdict(limits))]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), slot_fd),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(slot_fd)
        undo.pop_all()
    return process, slot, ours


def _end(process: subprocess.Popen[bytes], patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _discard(process: subprocess.Popen[bytes], slot: JobSlot, ours: socket.socket) -> None:
    """End a worker that nobody waits for any more."""
    slot.close()
    ours.close()
    process.kill()
    process.wait()

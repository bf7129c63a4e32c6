"""The router's end of one audio worker: starts the process, talks to it, and ends it."""

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
from functools import partial

from router.audio.limits import AudioLimits
from router.audio.protocol import (
    MAX_PCM_BYTES,
    PREFIX_BYTES,
    AddCredit,
    CancelUpload,
    Command,
    Ping,
    Report,
    UploadSlot,
    pack,
    unpack_prefix,
    unpack_report,
)
from router.audio.stream import AudioStream

# The child finds modules exactly where its parent does, whatever folder it starts in.
BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1'); "
    "from router.audio.worker import main; main()"
)


class AudioProcess:
    """One audio worker: the process, its socket, and the streams that it works on."""

    def __init__(self, process: subprocess.Popen[bytes], slot: UploadSlot) -> None:
        self.process = process
        self.slot = slot
        self.streams: dict[int, AudioStream] = {}
        self.ready = asyncio.Event()
        self.alive = True
        self.timed_out = False
        self.stalled = False
        self._n_silent = 0  # times in a row that it had neither answered nor worked
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
            # Either the thread sees that nobody waits, or it was done before, and we clean up.
            if not started.cancel() and started.exception() is None:
                loop.run_in_executor(None, _discard, *started.result())
            raise
        worker = cls(process, slot)
        try:
            worker._reader, worker._writer = await asyncio.open_unix_connection(
                sock=ours, limit=MAX_PCM_BYTES
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

    def send(self, command: Command) -> None:
        if self.alive:
            self._writer.write(pack(command))

    async def receive(self) -> tuple[Report, bytes]:
        """The next message and its PCM.

        Raises:
            EOFError: the worker is gone.
            ValueError: it sent something that no worker sends.
        """
        try:
            n_bytes, n_pcm_bytes = unpack_prefix(await self._reader.readexactly(PREFIX_BYTES))
            report = unpack_report(await self._reader.readexactly(n_bytes))
            self._is_asked = False
            return report, await self._reader.readexactly(n_pcm_bytes)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError from error

    def n_silent(self) -> int:
        """Ask for a sign of life. Returns how many times in a row there has been none.

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
            self.send(Ping())
        return self._n_silent

    def add(self, stream: AudioStream) -> None:
        """Work on the stream's upload from now on."""
        self.streams[stream.upload_id] = stream
        stream.add_credit = partial(self.send, AddCredit(stream.upload_id))
        self.send(stream.opening())

    def remove(self, stream: AudioStream) -> None:
        """Stop working on the stream's upload, if this worker has it."""
        if self.streams.pop(stream.upload_id, None) is None:
            return
        stream.add_credit = None
        if not stream.finished:
            self.send(CancelUpload(stream.upload_id))

    def end(self, patience_s: float) -> asyncio.Future[None]:
        """Close the socket, which ends the process; kill it if it does not end in time.

        A thread waits for the end, so it comes even if nobody awaits it. May be called again.
        """
        self.alive = False
        self._writer.close()
        loop = asyncio.get_running_loop()
        return asyncio.shield(loop.run_in_executor(None, _wait_or_kill, self.process, patience_s))


def _cpu_ticks(pid: int) -> int:
    """Processor time of a process so far, in the kernel's ticks.

    Where the kernel does not tell, the figure changes at every call: a worker that stands still
    is not found there.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return time.monotonic_ns()
    return int(fields[11]) + int(fields[12])  # utime and stime


Started = tuple[subprocess.Popen[bytes], UploadSlot, socket.socket]


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
    """Start a worker; returns it with its upload slot and our end of its socket."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as undo:
        undo.enter_context(ours)
        slot_fd = UploadSlot.make_file()
        try:
            slot = UploadSlot(slot_fd)
            undo.callback(slot.close)
            command = [sys.executable, "-c", BOOT, json.dumps([str(entry) for entry in sys.path])]
            command += [str(theirs.fileno()), str(slot_fd), json.dumps(dataclasses.asdict(limits))]
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), slot_fd),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C is for whoever holds the other end
            )
        finally:
            os.close(slot_fd)
        undo.pop_all()
    return process, slot, ours


def _wait_or_kill(process: subprocess.Popen[bytes], patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _discard(process: subprocess.Popen[bytes], slot: UploadSlot, ours: socket.socket) -> None:
    """End a worker that nobody waits for any more."""
    slot.close()
    ours.close()
    process.kill()
    process.wait()

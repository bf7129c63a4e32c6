"""The router's handle of an audio worker: starts the process, talks to it and ends it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from functools import partial

import psutil

from router.audio.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_PCM_BYTES,
    AudioLimits,
    Command,
    Order,
    Report,
    UploadReport,
    UploadSlot,
    WindowFound,
    pack,
    unpack_report,
)
from router.audio.stream import AudioStream

# The child has the same module path as its parent, whatever folder it starts in.
BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1'); "
    "from router.audio.worker import main; main()"
)


class AudioProcess:
    def __init__(self, limits: AudioLimits) -> None:
        """Start the process. `connect` must follow. Raises OSError."""
        self.streams: dict[int, AudioStream] = {}
        self.left: AudioStream | None = None  # the last one removed during a step on it
        self.ready = asyncio.Event()
        self.alive = True
        self.stalled = False
        self._n_still = 0  # checks in a row without progress
        self._cpu_s = (0.0, 0.0)
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._ours, theirs = socket.socketpair()
        with theirs, os.fdopen(UploadSlot.make_file()) as page, contextlib.ExitStack() as undo:
            undo.enter_context(self._ours)
            self.slot = UploadSlot(page.fileno())
            undo.callback(self.slot.close)
            passed = (theirs.fileno(), page.fileno())
            command = [sys.executable, "-c", BOOT, json.dumps([str(entry) for entry in sys.path])]
            self.process = subprocess.Popen(
                [*command, *map(str, passed), json.dumps(dataclasses.asdict(limits))],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C must not reach it
            )
            undo.pop_all()

    async def connect(self) -> None:
        """Open the connection. If cancelled, process and socket are closed."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(
                sock=self._ours, limit=MAX_PCM_BYTES
            )
        except BaseException:
            self.slot.close()
            self._ours.close()
            _wait_or_kill(self.process, 0.0)
            raise

    @property
    def is_able(self) -> bool:
        return self.alive and self.ready.is_set()

    @property
    def load(self) -> tuple[int, int]:
        return sum(s.wants_work for s in self.streams.values()), len(self.streams)

    def hears(self, stream: AudioStream) -> bool:
        """Whether it works on this audio already, whose voice detection can be shared."""
        return any(stream.audio == one.audio for one in self.streams.values())

    @property
    def n_long(self) -> int:
        return sum(stream.is_long for stream in self.streams.values())

    def send(self, command: Command) -> None:
        if self.alive:
            content = pack(command)
            self._writer.write(len(content).to_bytes(4) + content)

    async def receive(self) -> tuple[Report, bytes]:
        """The next message and its PCM. Raises EOFError, or ValueError if it is invalid."""
        try:
            report = unpack_report(await self._frame(MAX_MESSAGE_BYTES))
            has_pcm = isinstance(report, UploadReport) and isinstance(report.event, WindowFound)
            return report, await self._frame(MAX_PCM_BYTES) if has_pcm else b""
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EOFError from error

    async def _frame(self, most: int) -> bytes:
        n_bytes = int.from_bytes(await self._reader.readexactly(4), signed=True)
        if not 0 <= n_bytes <= most:
            raise ValueError(f"an audio worker announces {n_bytes} bytes")
        return await self._reader.readexactly(n_bytes)

    def n_still(self) -> int:
        """Number of checks in a row, with this one, at which it has work, but neither takes
        processor time nor waits for a core.
        """
        try:
            process = psutil.Process(self.process.pid)
            cpu_s, is_ready = process.cpu_times()[:2], process.status() == psutil.STATUS_RUNNING
        except psutil.Error:  # it has ended, which its socket reports
            return 0
        has_work = any(stream.wants_work for stream in self.streams.values())
        stands = has_work and cpu_s == self._cpu_s and not is_ready
        self._n_still = self._n_still + 1 if stands else 0
        self._cpu_s = cpu_s
        return self._n_still

    def add(self, stream: AudioStream) -> None:
        self.streams[stream.upload_id] = stream
        stream.add_credit = partial(self.send, Order("credit", stream.upload_id))
        self.send(stream.opening())

    def remove(self, stream: AudioStream) -> None:
        if self.streams.pop(stream.upload_id, None) is None:
            return
        stream.add_credit = None
        if self.slot.get() == stream.upload_id:
            self.left = stream
        if not stream.finished:
            self.send(Order("cancel", stream.upload_id))

    def end(self, patience_s: float) -> asyncio.Future[None]:
        """Close the socket. A thread waits for the end of the process, and kills it if late."""
        self.alive = False
        self._writer.close()
        loop = asyncio.get_running_loop()
        return asyncio.shield(loop.run_in_executor(None, _wait_or_kill, self.process, patience_s))


def _wait_or_kill(process: subprocess.Popen[bytes], patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

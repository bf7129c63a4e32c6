"""The router's end of one audio worker: starts the process, talks to it, and buries it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import socket
import subprocess
import sys

from cluster.messages import WINDOW_SAMPLES
from router.audio_limits import AudioLimits
from router.audio_protocol import PREFIX, JobSlot, Message, pack
from router.audio_stream import CREDIT, AudioStream

MAX_MESSAGE_BYTES = 65_536
# The child finds modules exactly where its parent does, whatever folder it starts in.
BOOT = (
    "import json, os, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "os.environ.update(OMP_NUM_THREADS='1', OPENBLAS_NUM_THREADS='1'); "
    "from router.audio_worker import main; main()"
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
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def spawn(cls, limits: AudioLimits) -> AudioProcess:
        starting = asyncio.ensure_future(asyncio.to_thread(_start, limits))
        try:
            process, slot, ours = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread forks whatever becomes of us: the child must not outlive it unseen.
            starting.add_done_callback(_abandon)
            raise
        worker = cls(process, slot)
        worker._reader, worker._writer = await asyncio.open_unix_connection(
            sock=ours, limit=2 * WINDOW_SAMPLES
        )
        return worker

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
            return message, await self._reader.readexactly(pcm_bytes) if pcm_bytes else b""
        except (asyncio.IncompleteReadError, OSError, ValueError) as error:
            raise EOFError from error

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

    async def bury(self, patience_s: float = 0.0) -> None:
        """Close the socket, which ends the process; kill it if it does not end in time."""
        self.alive = False
        self._writer.close()
        try:
            await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


Started = tuple[subprocess.Popen[bytes], JobSlot, socket.socket]


def _start(limits: AudioLimits) -> Started:
    """Fork a worker; returns it with its job slot and our end of its socket."""
    ours, theirs = socket.socketpair()
    slot_fd = JobSlot.make_file()
    command = [sys.executable, "-c", BOOT, json.dumps([str(entry) for entry in sys.path])]
    command += [str(theirs.fileno()), str(slot_fd), json.dumps(dataclasses.asdict(limits))]
    try:
        process = subprocess.Popen(
            command,
            pass_fds=(theirs.fileno(), slot_fd),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        return process, JobSlot(slot_fd), ours
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
        os.close(slot_fd)


def _abandon(starting: asyncio.Future[Started]) -> None:
    """End a worker that nobody waits for any more."""
    if starting.cancelled() or starting.exception() is not None:
        return
    process, slot, ours = starting.result()
    slot.close()
    ours.close()
    process.kill()
    process.wait()

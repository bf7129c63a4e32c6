"""What the router and an audio worker say to each other over one socket pair.

A message is a small JSON object, for a window followed by its PCM: no pickle, so a worker that an
upload has taken over can send nothing but text and samples. Beside the socket, a few shared bytes
tell the router which job a worker is on right now: that is whose fault its death is.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import tempfile
import time
from typing import Any

from cluster import errors
from cluster.errors import SplitscribeError

PREFIX = struct.Struct("<II")  # bytes of JSON, bytes of PCM
SLOT = struct.Struct("<Qd")  # job, when it was taken up (monotonic)

Message = dict[str, Any]


def pack(message: Message, pcm: memoryview | bytes = b"") -> list[memoryview | bytes]:
    """The pieces to send, in order."""
    head = json.dumps(message, separators=(",", ":")).encode()
    return [PREFIX.pack(len(head), len(pcm)) + head, pcm]


class WorkerSocket:
    """The worker's end: blocking sends; receives without waiting, or until something comes."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()

    def send(self, message: Message, pcm: memoryview | bytes = b"") -> None:
        for piece in pack(message, pcm):
            if piece:
                self._sock.sendall(piece)

    def receive(self, wait: bool) -> list[Message]:
        """Every whole message that is there; with `wait`, at least one.

        Raises:
            EOFError: the router is gone.
        """
        messages = self._parse()
        while True:
            try:
                flags = 0 if wait and not messages else socket.MSG_DONTWAIT
                chunk = self._sock.recv(65_536, flags)
            except BlockingIOError:
                return messages
            if not chunk:
                raise EOFError
            self._received += chunk
            messages += self._parse()

    def _parse(self) -> list[Message]:
        messages = []
        while len(self._received) >= PREFIX.size:
            length, _ = PREFIX.unpack_from(self._received)
            end = PREFIX.size + length
            if len(self._received) < end:
                break
            messages.append(json.loads(self._received[PREFIX.size : end]))
            del self._received[:end]
        return messages


class JobSlot:
    """Which job a worker is on; written by the worker, read by the router, even after a death."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)

    @staticmethod
    def make_file() -> int:
        """A file descriptor of the shared page, without a name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            return os.dup(file.fileno())

    def set(self, job: int) -> None:
        SLOT.pack_into(self._map, 0, job, time.monotonic())

    def clear(self) -> None:
        SLOT.pack_into(self._map, 0, 0, 0.0)

    def get(self) -> tuple[int, float]:
        """Return (job, seconds on it); job 0 is none."""
        job, since = SLOT.unpack_from(self._map)
        return job, time.monotonic() - since if job else 0.0

    def close(self) -> None:
        self._map.close()


def error_to_message(error: SplitscribeError) -> Message:
    return {
        "class": type(error).__name__,
        "message": error.message,
        "param": error.param,
        "code": error.code,
    }


def error_from_message(message: Message) -> SplitscribeError:
    kind = getattr(errors, str(message["class"]), None)
    if not (isinstance(kind, type) and issubclass(kind, SplitscribeError)):
        kind = errors.WorkerError
    return kind(message["message"], param=message["param"], code=message["code"])

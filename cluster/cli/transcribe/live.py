"""`splitscribe transcribe --live`: print words while they are spoken.

The first Ctrl-C ends the audio, and the last words are still printed; the second ends the command.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import av
import numpy as np
from rich.console import Console

from cluster.cli.default_model import download, say_if_toy
from cluster.cli.transcribe.job import STDIN, LiveJob
from cluster.common.errors import ConfigurationError, InvalidAudioError, InvalidRequestError
from cluster.common.extras import require_extra
from cluster.common.logs import counted
from cluster.common.messages import SAMPLE_RATE, Pcm
from router.live.interface import TextDelta, TurnCompleted, TurnFailed

if TYPE_CHECKING:
    from cluster.cli.transcribe.client import LiveClient

BLOCK_S = 0.1  # of audio, at least, but for the last block
READ_BYTES = 4096  # at most, from standard input
QUEUED_BLOCKS = 64  # between the reading thread and the event loop


def transcribe_live(job: LiveJob, out: Console, err: Console) -> None:
    """Raises SplitscribeError: the session failed, or turns did (printed before)."""
    if job.source is None:
        require_sounddevice()
    if not job.target.server:
        download(job.config.model, err)
        say_if_toy({job.config.model}, err)
    if n_failed := asyncio.run(_listen(job, out, err)):
        turns = counted(n_failed, "turn")
        raise InvalidRequestError(f"{turns} failed: the text is incomplete")


async def _listen(job: LiveJob, out: Console, err: Console) -> int:
    from cluster.cli.transcribe.client import live_client  # imports OpenAI's client

    stop = threading.Event()
    async with live_client(job) as client:
        with _stopped_by_interrupt(stop):
            if job.source is None:
                err.print("splitscribe: listening; Ctrl-C stops it", style="dim")
            try:
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(_send(job, client, stop))
                    n_failed = await _print(client, out, err)
                    sending.cancel()  # it still runs only if the session ended first
            except ExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            return n_failed


async def _send(job: LiveJob, client: LiveClient, stop: threading.Event) -> None:
    async for block in blocks_of(job, client.rate, stop):
        await client.append(block)
    await client.end()


async def _print(client: LiveClient, out: Console, err: Console) -> int:
    """Print a line for each turn until the reader of stdout has gone. Return the failed turns."""
    n_failed, begun = 0, False
    async for event in client.events():
        try:
            match event:
                case TextDelta(_, text) if shown := text if begun else text.lstrip():
                    out.print(shown, end="", markup=False, highlight=False)
                    out.file.flush()
                    begun = True
                case TurnCompleted() | TurnFailed() if begun:
                    out.print()
                    begun = False
        except (OSError, SystemExit):  # stdout was closed; rich raises SystemExit
            return n_failed
        if isinstance(event, TurnFailed):
            n_failed += 1
            err.print(f"splitscribe: {event.error}", style="red", markup=False)
    return n_failed


@contextmanager
def _stopped_by_interrupt(stop: threading.Event) -> Iterator[None]:
    """The first SIGINT sets `stop`; later ones interrupt as usual."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


# ---- audio sources ----


def open_sound(
    source: str | None, rate: int, stop: threading.Event, *, raw: bool = False
) -> Iterator[Pcm]:
    """Yield mono int16 blocks at `rate` Hz until the source ends or `stop` is set.

    Raises ConfigurationError: there is no microphone. InvalidAudioError: the source has no audio.
    """
    return _microphone(rate, stop) if source is None else _decoded(source, rate, stop, raw)


async def blocks_of(job: LiveJob, rate: int, stop: threading.Event) -> AsyncIterator[Pcm]:
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[Pcm | Exception | None] = asyncio.Queue(QUEUED_BLOCKS)

    def put(item: Pcm | Exception | None) -> None:
        asyncio.run_coroutine_threadsafe(queue.put(item), loop).result()

    def read() -> None:
        try:
            for block in open_sound(job.source, rate, stop, raw=job.raw):
                put(block)
            put(None)
        except Exception as error:
            put(error)

    # A daemon thread, since a read of standard input cannot be interrupted at exit.
    threading.Thread(target=read, name="sound", daemon=True).start()
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item


def require_sounddevice() -> Any:
    require_extra("microphone", "sounddevice")
    try:
        import sounddevice
    except OSError as error:  # the package is there but not its C library
        raise ConfigurationError(
            f"the microphone needs PortAudio on this machine: {error}"
        ) from error
    return sounddevice


def _microphone(rate: int, stop: threading.Event) -> Iterator[Pcm]:
    sounddevice = require_sounddevice()
    try:
        with sounddevice.RawInputStream(samplerate=rate, channels=1, dtype="int16") as stream:
            while not stop.is_set():
                data, _ = stream.read(round(BLOCK_S * rate))
                yield np.frombuffer(bytes(data), np.int16)
    except sounddevice.PortAudioError as error:
        raise ConfigurationError(f"the microphone cannot be opened: {error}") from error


def _decoded(source: str, rate: int, stop: threading.Event, raw: bool) -> Iterator[Pcm]:
    resampler = av.AudioResampler(format="s16", layout="mono", rate=rate)
    piped = source == STDIN
    opened: Any = _Unbuffered() if piped else source
    name = "standard input" if piped else source
    options = {"sample_rate": str(SAMPLE_RATE), "ch_layout": "mono", "probesize": "32"}
    how: dict[str, Any] = {"format": "s16le", "options": options} if raw else {}
    waiting: list[Pcm] = []  # of less than a block: codecs' frames are short
    try:
        with av.open(opened, buffer_size=READ_BYTES, **how) as container:
            if not container.streams.audio:
                raise InvalidAudioError(f"{name} has no audio")
            for frame in itertools.chain(container.decode(audio=0), [None]):
                if stop.is_set():
                    return
                waiting += [cast(Pcm, one.to_ndarray()[0]) for one in resampler.resample(frame)]
                if waiting and (frame is None or sum(map(len, waiting)) >= BLOCK_S * rate):
                    yield np.concatenate(waiting)
                    waiting.clear()
    except (av.FFmpegError, OSError) as error:
        hint = "; is it raw samples? say --raw" if piped and not raw else ""
        raise InvalidAudioError(f"{name} cannot be read as audio: {error}{hint}") from error


class _Unbuffered:
    """Standard input for PyAV: a read returns the bytes that have arrived."""

    def read(self, n_bytes: int) -> bytes:
        return os.read(0, n_bytes)

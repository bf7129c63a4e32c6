"""`splitscribe transcribe --live`: prints words while they are spoken.

Audio goes from its source to a live session as it arrives, and each word is printed as soon as it
is final, with one line for each turn. The session is a server's, by OpenAI's realtime API, or one
in this process. The first Ctrl-C ends the audio, so that the last words are still printed; the
second ends the command.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

from rich.console import Console

from cluster.cli.transcribe.job import LiveClient, LiveJob, Source
from cluster.cli.transcribe.sound import blocks_of
from cluster.common.errors import InvalidRequestError

MAX_UNSENT_S = 30.0  # of audio that is sent ahead, such as a file's
LOOK_AGAIN_S = 0.05


def transcribe_live(job: LiveJob, out: Console, err: Console) -> None:
    """Transcribe until the audio ends.

    Raises:
        SplitscribeError: nothing could be done at all, or turns failed, which were printed before.
    """
    if n_failed := asyncio.run(_listen(job, out, err)):
        raise InvalidRequestError(f"{n_failed} turns failed: their text is incomplete")


async def _listen(job: LiveJob, out: Console, err: Console) -> int:
    stop = threading.Event()
    async with _opened(job) as client:
        with _stopped_by_interrupt(stop):
            if job.source.path is None:
                err.print("splitscribe: listening; Ctrl-C ends", style="dim")
            try:
                async with asyncio.TaskGroup() as group:
                    sending = group.create_task(_send(job.source, client, stop))
                    n_failed = await _print(client, out, err)
                    sending.cancel()  # it has ended, unless the session ended first
            except ExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            return n_failed


def _opened(job: LiveJob) -> AbstractAsyncContextManager[LiveClient]:
    if job.target.server:  # each imports a large library, so only the one that is needed
        from cluster.cli.transcribe.remote import live_through_server

        return live_through_server(job)
    from cluster.cli.transcribe.local import live_in_process

    return live_in_process(job)


async def _send(source: Source, client: LiveClient, stop: threading.Event) -> None:
    async for block in blocks_of(source, client.rate, stop):
        await client.append(block)
        while client.unsent_s > MAX_UNSENT_S and not stop.is_set():  # noqa: ASYNC110
            await asyncio.sleep(LOOK_AGAIN_S)  # a client has no event for its change
    await client.end()


async def _print(client: LiveClient, out: Console, err: Console) -> int:
    """Print the text, one line for each turn, while anybody reads it.

    Returns how many turns failed.
    """
    n_failed, begun = 0, False
    async for said in client.said():
        text = said.text if begun else said.text.lstrip()
        try:
            if text:
                out.print(text, end="", markup=False, highlight=False)
                out.file.flush()
                begun = True
            if said.ends_turn and begun:
                out.print()
                begun = False
        except (OSError, SystemExit):  # nobody reads on: rich would end the process
            return n_failed
        if said.error is not None:
            n_failed += 1
            err.print(f"splitscribe: {said.error}", style="red", markup=False)
    return n_failed


@contextmanager
def _stopped_by_interrupt(stop: threading.Event) -> Iterator[None]:
    """The first SIGINT sets `stop`; from then on it interrupts as usual."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

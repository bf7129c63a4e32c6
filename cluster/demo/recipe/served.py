"""Recordings through the whole served path in this process: what a user of the checkpoint gets.

Audio workers, encoder, hand-off and decoder, with the settings given; KV is moved in memory.
"""

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.serve.in_process import local_transcriber
from cluster.settings import Settings
from router.api.params import TranscriptionParams
from router.interface import RequestContext
from router.transcript import Transcript

AT_ONCE = 4  # files in flight
NO_DEADLINE_S = 24 * 3600.0


def transcribe_served(
    settings: Settings,
    params: TranscriptionParams,
    files: Sequence[bytes],
    on_done: Callable[[], None] = lambda: None,
) -> list[Transcript]:
    """Transcribe the contents of audio files; `on_done` is called after each."""
    return asyncio.run(_transcribe_all(settings, params, files, on_done))


async def _transcribe_all(
    settings: Settings,
    params: TranscriptionParams,
    files: Sequence[bytes],
    on_done: Callable[[], None],
) -> list[Transcript]:
    slots = asyncio.Semaphore(AT_ONCE)
    async with local_transcriber(settings) as transcriber:

        async def send(content: bytes, file: Path) -> Transcript:
            async with slots:
                await asyncio.to_thread(file.write_bytes, content)
                context = RequestContext.unlimited(file.name, NO_DEADLINE_S)
                result = await transcriber.transcribe(file, params, context)
                await asyncio.to_thread(file.unlink)
                on_done()
                return result.transcript

        with tempfile.TemporaryDirectory(prefix="splitscribe-demo-") as folder:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(send(content, Path(folder) / str(index)))
                    for index, content in enumerate(files)
                ]
    return [task.result() for task in tasks]

"""How fast an archive would go here: some of its files are transcribed for a while, for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from cluster.archives.archive import Archive
from cluster.archives.inputs import Item
from cluster.archives.run import Measured
from cluster.archives.transcriber import local_file, pairs_of, unlimited_engine
from cluster.errors import SplitscribeError
from router.api.params import TranscriptionParams

TRIAL_S = 30.0


def measure_speed(archive: Archive, items: Sequence[Item], limit_s: float = TRIAL_S) -> Measured:
    """Transcribe some of `items` for at most so long, from the first answer on.

    Raises:
        SplitscribeError: none of them could be transcribed.
    """
    middle = items[len(items) // 2 :] or items
    files = [item for item in middle if item.row < 0][: archive.files_at_once]
    return asyncio.run(_measure(archive, files, limit_s))


async def _measure(archive: Archive, items: Sequence[Item], limit_s: float) -> Measured:
    heard: dict[str, float] = {}
    errors: list[Exception] = []
    async with unlimited_engine() as engine:
        params = engine.params(pairs_of(archive.fields), archive.task)

        async def transcribe(item: Item, params: TranscriptionParams) -> None:
            def note(done_s: float, known_s: float) -> None:
                heard[item.key] = done_s

            try:
                with local_file(item.path) as path:
                    await engine.transcribe(path, params, on_progress=note)
            except (SplitscribeError, OSError) as error:
                errors.append(error)

        started_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*(transcribe(item, params) for item in items))
        taken_s = time.monotonic() - started_s
    audio_s = sum(heard.values())
    if not audio_s and errors:
        raise errors[0]
    return Measured(audio_s / taken_s, audio_s)

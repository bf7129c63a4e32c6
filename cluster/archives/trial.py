"""How fast an archive would go here: some of its files are transcribed for a while, for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from cluster.archives.archive import Archive, Fields
from cluster.archives.inputs import Item
from cluster.archives.run import Measured
from cluster.archives.transcriber import is_ours, local_file, pairs_of, unlimited_engine
from cluster.errors import SplitscribeError
from cluster.messages import Task

TRIAL_S = 30.0


def measure_speed(archive: Archive, items: Sequence[Item], limit_s: float = TRIAL_S) -> Measured:
    """Transcribe some of `items` for at most so long, in a process of the Ray cluster.

    Raises:
        SplitscribeError: none of them could be transcribed.
    """
    import ray

    middle = items[len(items) // 2 :] or items
    files = [item.path for item in middle if item.row < 0][: archive.files_at_once]
    # Serve's handles belong to one event loop of a process, and this one's has ended.
    trial = ray.remote(num_cpus=0)(_trial)
    try:
        speed, audio_s = ray.get(trial.remote(dict(archive.fields), archive.task, files, limit_s))
    except Exception as error:
        if (ours := is_ours(error)) is not None:
            raise ours from error
        raise
    return Measured(speed, audio_s)


def _trial(fields: Fields, task: Task, files: Sequence[str], limit_s: float) -> tuple[float, float]:
    """Hours of audio in an hour, and the seconds of audio that were transcribed."""
    return asyncio.run(_measure(fields, task, files, limit_s))


async def _measure(
    fields: Fields, task: Task, files: Sequence[str], limit_s: float
) -> tuple[float, float]:
    heard: dict[str, float] = {}
    errors: list[Exception] = []
    async with unlimited_engine() as engine:
        params = engine.params(pairs_of(fields), task)

        async def transcribe(file: str) -> None:
            def note(done_s: float, known_s: float) -> None:
                heard[file] = done_s

            try:
                with local_file(file) as path:
                    await engine.transcribe(path, params, on_progress=note)
            except (SplitscribeError, OSError) as error:
                errors.append(error)

        started_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(transcribe, files))
        taken_s = time.monotonic() - started_s
    audio_s = sum(heard.values())
    if not audio_s and errors:
        raise errors[0]
    return audio_s / taken_s, audio_s

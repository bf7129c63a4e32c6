"""How fast an archive would go here: some of its files are transcribed for a while, for nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from contextlib import nullcontext

from cluster.archives.archive import Archive, Fields
from cluster.archives.inputs import Item
from cluster.archives.item_transcriber import audio_of
from cluster.archives.rows import failed_row
from cluster.archives.run import Measured
from cluster.archives.transcriber import is_ours, local_file, pairs_of, unlimited_engine
from cluster.errors import SplitscribeError
from cluster.messages import Task

TRIAL_S = 30.0
Source = tuple[str, int, str]  # of an item: path, row, column


def measure_speed(archive: Archive, items: Sequence[Item], limit_s: float = TRIAL_S) -> Measured:
    """Transcribe some of `items` for at most so long, in a process of the Ray cluster.

    Raises:
        SplitscribeError: there is no application to ask, or it refuses the fields.
    """
    import ray

    middle = items[len(items) // 2 :] or items
    files = [(one.path, one.row, one.column) for one in middle[: archive.files_at_once]]
    # Serve's handles belong to one event loop of a process, and this one's has ended.
    trial = ray.remote(num_cpus=0)(_trial)
    try:
        found = ray.get(trial.remote(dict(archive.fields), archive.task, files, limit_s))
    except Exception as error:
        if (ours := is_ours(error)) is not None:
            raise ours from error
        raise
    return Measured(*found)


def _trial(
    fields: Fields, task: Task, files: Sequence[Source], limit_s: float
) -> tuple[float, float, str]:
    """Hours of audio in an hour, the seconds of audio that were transcribed, and why none were."""
    return asyncio.run(_measure(fields, task, files, limit_s))


async def _measure(
    fields: Fields, task: Task, files: Sequence[Source], limit_s: float
) -> tuple[float, float, str]:
    heard: dict[Source, float] = {}
    errors: list[str] = []
    async with unlimited_engine() as engine:
        params = engine.params(pairs_of(fields), task)

        async def transcribe(file: Source) -> None:
            def note(done_s: float, known_s: float) -> None:
                heard[file] = done_s

            path, content = audio_of(*file)
            try:
                with nullcontext(content) if content is not None else local_file(path) as upload:
                    await engine.transcribe(upload, params, on_progress=note)
            except (SplitscribeError, OSError) as error:
                errors.append(failed_row(error)["error"])

        started_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(transcribe, files))
        taken_s = time.monotonic() - started_s
    audio_s = sum(heard.values())
    why = f"{len(errors)} of {len(files)} files failed, as with: {errors[0]}" if errors else ""
    return audio_s / taken_s, audio_s, why

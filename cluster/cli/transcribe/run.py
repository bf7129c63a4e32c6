"""Transcribe a job's files, several at a time; a file that fails does not stop the others."""

from __future__ import annotations

import asyncio
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cluster.archives.places import Place
from cluster.cli.default_model import download, say_if_toy
from cluster.cli.transcribe.job import Input, Job, TranscribeFile, Watcher, inputs_of
from cluster.common.errors import InvalidRequestError, SplitscribeError
from cluster.common.logs import counted
from router.api.formats import WRITERS
from router.api.subtitles import CueOptions, clock
from router.transcript import Segment, Transcript


def transcribe_files(job: Job, out: Console, err: Console) -> None:
    """Raises SplitscribeError: nothing can be transcribed, or files failed (printed before)."""
    with inputs_of(job.files, raw=job.raw) as inputs:
        shown = {one.path: one.shown for one in inputs}
        check_names(shown)
        try:
            job.output_dir.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=job.output_dir).close()
        except OSError as error:
            raise InvalidRequestError(
                f"cannot write into {job.output_dir}: {error.strerror}"
            ) from error
        lengths: dict[Path, float | None] = {}
        for one in inputs:
            try:
                lengths[one.path] = _length_of(one, may_be_unknown=bool(job.target.server))
            except (OSError, InvalidRequestError) as error:
                _tell(one.shown, error, err)
        n_failed = len(inputs) - len(lengths)
        if lengths:
            if not job.target.server:
                download(job.params.model, err)
                say_if_toy({job.params.model}, err)
            n_failed += asyncio.run(_open_and_run(Run(job, out, err, shown), lengths))
    if n_failed:
        raise InvalidRequestError(f"{n_failed} of {counted(len(inputs), 'file')} failed")


async def _open_and_run(run: Run, lengths: Mapping[Path, float | None]) -> int:
    from cluster.cli.transcribe.client import opened  # imports OpenAI's client

    async with opened(run.job, run.err) as transcribe_one:
        return await run.run(lengths, transcribe_one)


@dataclass(slots=True)
class Run:
    """shown: the names of files in messages, where they are not the paths."""

    job: Job
    out: Console
    err: Console
    shown: Mapping[Path, str] = field(default_factory=dict)
    n_workers: int = 1
    n_failed: int = 0

    async def run(
        self, lengths: Mapping[Path, float | None], transcribe_one: TranscribeFile
    ) -> int:
        """Transcribe at most `jobs` files at a time. Return how many failed.

        lengths: of each file in seconds, where its container states it.
        """
        self.n_workers = min(self.job.jobs, len(lengths))
        board, slots = ProgressBoard(lengths, self.err), asyncio.Semaphore(self.job.jobs)

        async def work(file: Path) -> None:
            async with slots:
                board.start(file)
                try:
                    await self._transcribe(file, transcribe_one, board)
                except Exception as error:
                    self.n_failed += 1
                    _tell(self._name(file), error, self.err)
                board.end(file)

        with board.bars:
            async with asyncio.TaskGroup() as group:
                for file in lengths:
                    group.create_task(work(file))
        return self.n_failed

    async def _transcribe(
        self, file: Path, transcribe_one: TranscribeFile, board: ProgressBoard
    ) -> None:
        def on_segments(segments: Sequence[Segment]) -> None:
            if self.n_workers == 1:  # no other file prints between them
                self._show(file, segments)

        watcher = Watcher(partial(board.advance, file), on_segments)
        transcript = await transcribe_one(file, watcher)
        for one in transcript.channels:
            if one.speaker is None:
                why = f"sounds like channel {one.same_as}" if one.same_as else "is silent"
                told = f"{self._name(file)}: channel {one.channel} is left out: it {why}"
                self.err.print(f"splitscribe: {told}", markup=False)
        board.advance(file, transcript.duration_s, transcript.duration_s)
        job = self.job
        try:
            write_results(transcript, file, job.output_dir, job.formats, job.cues)
        except OSError as error:  # of the output, not of the audio file
            raise InvalidRequestError(
                f"cannot write into {job.output_dir}: {error.strerror}"
            ) from error
        if self.n_workers > 1:
            self._show(file, transcript.segments)

    def _name(self, file: Path) -> str:
        return self.shown.get(file, str(file))

    def _show(self, file: Path, segments: Sequence[Segment]) -> None:
        if not self.job.verbose or not segments:
            return
        # Where both are one terminal, print through the console that keeps the bars below.
        console = self.err if self.out.is_terminal and self.err.is_terminal else self.out
        # Rich raises SystemExit where stdout was closed, as by `| head`, but the work goes on.
        with suppress(OSError, SystemExit):
            if self.n_workers > 1:
                console.print(self._name(file), markup=False)
            for segment in segments:
                times = f"[{clock(segment.start)} --> {clock(segment.end)}]"
                name = "" if segment.speaker is None else f"{segment.speaker}:"
                console.print(f"{times} {name}{segment.text}", markup=False)


def _length_of(one: Input, *, may_be_unknown: bool) -> float | None:
    """Fetch an input, and return the seconds of audio that its container states, if any.

    may_be_unknown: accept what is no audio here, as a server may know more formats. Raises OSError,
    or InvalidRequestError: it cannot be fetched, or it is no audio.
    """
    from cluster.cli.transcribe.local import declared_s

    one.fetch()
    try:
        return declared_s(one.path)
    except InvalidRequestError:
        if may_be_unknown:
            return None
        raise


def _tell(file: str, error: Exception, err: Console) -> None:
    if not isinstance(error, (SplitscribeError, OSError)):
        err.print("".join(traceback.format_exception(error)), markup=False)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    err.print(f"splitscribe: {file}: {text}", style="red", markup=False)


def check_names(audio_files: Mapping[Path, str]) -> None:
    """Refuse inputs whose results would overwrite each other. audio_files: path -> name."""
    taken: dict[str, str] = {}
    for file, shown in audio_files.items():
        if other := taken.get(file.stem):
            raise InvalidRequestError(
                f"{other} and {shown} would both be written to '{file.stem}.*': rename one, "
                "or transcribe them apart, each with its own --output-dir"
            )
        taken[file.stem] = shown


def write_results(
    transcript: Transcript, audio: Path, folder: Path, formats: Sequence[str], cues: CueOptions
) -> None:
    for name in formats:
        target = Place.of(str(folder / f"{audio.stem}.{name}"))
        target.write_whole(WRITERS[name](transcript, cues).encode())


class ProgressBoard:
    """A bar for all files and one for each in work, in seconds of audio."""

    def __init__(self, lengths: Mapping[Path, float | None], console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
        )
        self.bars = Progress(*columns, TimeElapsedColumn(), console=console)
        self._whole = self.bars.add_task("", total=None, state="", visible=len(lengths) > 1)
        for file, length_s in lengths.items():
            self.bars.add_task(file.name, start=False, total=length_s, visible=False, state="")
        self._tasks = dict(zip(lengths, self.bars.tasks[1:], strict=True))
        self._n_ended = 0
        self._show_whole()

    def start(self, file: Path) -> None:
        task = self._tasks[file].id
        self.bars.start_task(task)
        self.bars.update(task, visible=True)

    def advance(self, file: Path, done_s: float, known_s: float) -> None:
        task = self._tasks[file]
        total_s = max(done_s, known_s, task.total or 0.0)
        state = f"{done_s:.0f}/{total_s:.0f} s"
        self.bars.update(task.id, completed=done_s, total=total_s, state=state)
        self._show_whole()

    def end(self, file: Path) -> None:
        self._n_ended += 1
        if len(self._tasks) > 1:
            task = self._tasks[file]
            self.bars.update(task.id, total=task.completed, visible=False)
        self._show_whole()

    def _show_whole(self) -> None:
        tasks = self._tasks.values()
        done_s, total_s = sum(one.completed for one in tasks), sum(one.total or 0 for one in tasks)
        self.bars.update(
            self._whole,
            description=f"{self._n_ended} of {len(tasks)} files",
            completed=done_s,
            total=total_s or None,
            state=f"{done_s:.0f}/{total_s:.0f} s" if total_s else "",
        )

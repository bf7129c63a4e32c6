"""`splitscribe batch` at work: lists, finds or starts an application, runs, and reports."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from cluster.archives.archive import Archive
from cluster.archives.inputs import STDIN, list_items
from cluster.archives.outputs import (
    FAILURES,
    Outputs,
    Pending,
    keep_speed,
    read_speed,
    told,
    write_failures,
)
from cluster.archives.own_pools import own_settings
from cluster.archives.places import is_url
from cluster.archives.progress import RunProgress, Totals, duration
from cluster.archives.run import ArchiveRun, look_at
from cluster.archives.transcriber import unlimited_engine
from cluster.cli.batch.application import (
    BatchJob,
    found_application,
    model_of,
    own_application,
)
from cluster.cli.batch.cluster_watch import ClusterWatch
from router.http.models import ALIAS

ALL_DONE, SOME_FAILED = 0, 3


def run_batch(job: BatchJob, out: Console, err: Console) -> int:
    """Returns the exit status.

    Raises:
        SplitscribeError: nothing could be done, or the run could not go on.
        KeyboardInterrupt: the run was interrupted; what is done is kept.
    """

    def say(line: str) -> None:
        err.print(f"splitscribe: {line}", markup=False)

    items = list_items(absolute(job.inputs), sys.stdin)
    with ExitStack() as stack:
        found = stack.enter_context(found_application(job, say))
        settings = found.settings if found else own_settings(job.model, job.config)
        archive = job.archive
        if found is None and not settings.models:  # a folder is served by its name alone
            archive = replace(archive, fields={**archive.fields, "model": ALIAS})
        archive = replace(archive, model=model_of(settings, str(archive.fields["model"])))
        outputs = stack.enter_context(Outputs.opened(archive, only_looks=job.dry_run))
        progress = RunProgress(Totals(), err)
        listing = look_at(items, outputs, progress.totals)
        if job.dry_run:
            deque(listing, maxlen=0)
            out.print(_forecast(archive, progress.totals), markup=False)
            return ALL_DONE
        with told(archive.where):
            first = next(filter(None, listing), None)
        if first is None:
            say(progress.totals.summary())
        else:
            # Before the application, which ends first then: Serve's handles end in this loop.
            runner = found.runner if found else stack.enter_context(asyncio.Runner())
            if found is None:
                stack.enter_context(own_application(job, settings, say))
            # Ray has set its own, which ends the process.
            before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
            stack.callback(signal.signal, signal.SIGTERM, before)
            _run(archive, outputs, chain((first,), listing), progress, runner)
        return _finish(archive, progress, out)


def _run(
    archive: Archive,
    outputs: Outputs,
    listing: Iterator[list[Pending]],
    progress: RunProgress,
    runner: asyncio.Runner,
) -> None:
    totals = progress.totals

    def cluster_ended() -> None:
        progress.stop()
        progress.say(
            f"the Ray cluster has ended: {totals.n_done + progress.n_done} files are done and "
            "kept; the same command goes on from here"
        )

    async def work() -> None:
        async with unlimited_engine() as engine:
            await ArchiveRun(archive, outputs, engine, progress).run(listing)

    with progress, ClusterWatch.of_process(cluster_ended) as watch:
        try:
            with told(archive.where):
                runner.run(work())
        except KeyboardInterrupt:
            write_failures(archive.where, totals.failures)
            raise
        except Exception:
            watch.end_if_gone()
            raise


def _finish(archive: Archive, progress: RunProgress, out: Console) -> int:
    totals, where = progress.totals, archive.where
    with told(where):
        write_failures(where, totals.failures)
        if progress.done_s:
            keep_speed(where, progress.speed)
    n_failed = len(totals.failures)
    out.print(
        f"{totals.n_items - n_failed} of {totals.n_items} files have their transcripts in "
        f"{where.name}" + (f"; this run: {progress.line()}" if progress.n_done else ""),
        markup=False,
    )
    if n_failed:
        out.print(f"{n_failed} failed, for the reasons in {where.name}/{FAILURES}", markup=False)
    return SOME_FAILED if n_failed else ALL_DONE


def _forecast(archive: Archive, totals: Totals) -> str:
    if not totals.n_pending:
        return "nothing is left to do"
    told_ = totals.summary()
    speed = read_speed(archive.where)
    if not speed:
        return f"{told_}; no run has measured yet how fast it goes here"
    left = duration(totals.about_s / speed)
    return f"{told_}; at the last run's speed, {speed:.1f} hours per hour, about {left}"


def absolute(names: tuple[str, ...]) -> tuple[str, ...]:
    """Paths as they are from here, since the process moves to an empty folder."""
    return tuple(
        name if name == STDIN or is_url(name) else str(Path(name).expanduser().absolute())
        for name in names
    )

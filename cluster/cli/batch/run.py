"""`splitscribe batch` at work: lists, plans, finds or starts an application, runs, tells."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NoReturn

from rich.console import Console

from cluster.archives.archive import Archive
from cluster.archives.inputs import Item, list_items
from cluster.archives.ledger import Ledger
from cluster.archives.own_pools import own_settings
from cluster.archives.progress import RunProgress, duration, hours
from cluster.archives.run import (
    FAILURES,
    Measured,
    Plan,
    keep_measured,
    make_plan,
    read_measured,
    run_archive,
    write_failures,
)
from cluster.archives.transcriber import is_ours
from cluster.archives.trial import measure_speed
from cluster.cli.batch.application import (
    absolute,
    found_application,
    model_of,
    own_application,
)
from cluster.cli.batch.cluster_watch import ClusterWatch
from cluster.cli.batch.job import BatchJob
from cluster.errors import ConfigurationError
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
        settings = found or own_settings(job.model, job.config)
        archive = job.archive
        if found is None and not settings.models:  # a folder is served by its name alone
            archive = replace(archive, fields={**archive.fields, "model": ALIAS})
        archive = replace(archive, model=model_of(settings, str(archive.fields["model"])))
        ledger = stack.enter_context(Ledger.opened(archive.where))
        plan = make_plan(archive, items, ledger)
        say(_summary(items, plan))
        if plan.pending and found is None:
            stack.enter_context(own_application(job, settings, say))
        # Ray has set its own, which ends the process.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _interrupt))
        if job.dry_run:
            out.print(_forecast(archive, plan), markup=False)
            return ALL_DONE
        return _run(archive, plan, items, ledger, out, err)


def _run(
    archive: Archive,
    plan: Plan,
    items: Sequence[Item],
    ledger: Ledger,
    out: Console,
    err: Console,
) -> int:
    def cluster_ended() -> None:
        progress.stop()
        n_kept = plan.n_done + progress.n_done
        err.print(
            f"splitscribe: the Ray cluster has ended: {n_kept} of {len(items)} files are done and "
            "kept; the same command goes on from here",
            style="red",
            markup=False,
        )

    with RunProgress(plan.pending, err) as progress, ExitStack() as stack:
        watch = None
        if plan.pending:
            watch = stack.enter_context(ClusterWatch.of_process(cluster_ended))
        try:
            run_archive(archive, plan, items, ledger, progress)
            n_failed = write_failures(archive, items, ledger)
            if progress.done_s:
                keep_measured(archive.where, Measured(progress.speed, progress.done_s))
        except KeyboardInterrupt:
            write_failures(archive, items, ledger)
            raise
        except OSError as error:
            raise ConfigurationError(f"{archive.where.name} cannot be written: {error}") from error
        except Exception as error:
            if watch is not None:
                watch.end_if_gone()
            if (ours := is_ours(error)) is not None:
                raise ours from error
            raise
    n_done = len(items) - n_failed
    out.print(
        f"{n_done} of {len(items)} files have their transcripts in {archive.where.name}"
        + (f"; this run: {progress.line()}" if progress.n_done else ""),
        markup=False,
    )
    if n_failed:
        table = f"{archive.where.name}/{FAILURES}"
        out.print(f"{n_failed} failed, for the reasons in {table}", markup=False)
    return SOME_FAILED if n_failed else ALL_DONE


def _summary(items: Sequence[Item], plan: Plan) -> str:
    parts = [f"{len(items)} files"]
    if plan.n_done:
        parts.append(f"{plan.n_done} are done")
    if plan.failed:
        parts.append(f"{len(plan.failed)} failed before (--retry-failed tries them again)")
    parts.append(f"{len(plan.pending)} to do, about {hours(plan.about_s)} of audio by their sizes")
    return ", ".join(parts)


def _forecast(archive: Archive, plan: Plan) -> str:
    if not plan.pending:
        return "nothing is left to do"
    measured = read_measured(archive.where)
    how = "the last run's speed"
    if measured is None or not measured.speed:
        measured = measure_speed(archive, plan.pending)
        how = f"the speed of a trial with {hours(measured.audio_s)} of it"
    if not measured.speed:
        nothing = f"nothing of it was done within the trial{measured.why and f': {measured.why}'}"
        return f"{len(plan.pending)} files, about {hours(plan.about_s)} of audio; {nothing}"
    left_s = plan.about_s / measured.speed
    return (
        f"{len(plan.pending)} files, about {hours(plan.about_s)} of audio by their sizes; at "
        f"{how}, {measured.speed:.1f} hours per hour, about {duration(left_s)}"
    )


def _interrupt(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt

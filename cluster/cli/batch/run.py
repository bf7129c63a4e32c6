"""Run `splitscribe batch`: find or start an application, transcribe, and print the results."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rich.console import Console

from cluster.archives.inputs import Item
from cluster.archives.outputs import FAILURES, SPEED, Archive, Outputs, told, write_failures
from cluster.archives.run import RunProgress, hours, look_at, run_archive
from cluster.cli.default_model import download, say_if_toy, with_default_model
from cluster.common.errors import ConfigurationError
from cluster.common.logs import counted
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.bulk.engine import Told, application_settings, engine_of_application
from cluster.serve.distribution import build_id
from cluster.serve.ray_environment import joining_environment
from cluster.serve.ray_internals import (
    KEEP_SIGNALS,
    ray_addresses_here,
)
from cluster.serve.start.readiness import Say, check_ray_answers
from router.http.models import ALIAS

NO_CLUSTER = "none"
ALL_DONE, ENDED, SOME_FAILED = 0, 1, 3  # exit status; ENDED: the Ray cluster has ended
DYING_S = 5.0  # until the watch notices a cluster that ends


def run_batch(
    items: Iterator[Item],
    archive: Archive,
    out: Console,
    err: Console,
    *,
    model: str | None,
    address: str | None,
    config: Path | None,
    dry_run: bool,
) -> int:
    """Return the exit status.

    model, config: of pools that are started here. address: of a Ray cluster; None looks for one,
    NO_CLUSTER starts one.
    """

    def say(line: str) -> None:
        err.print(f"splitscribe: {line}", markup=False)

    with ExitStack() as stack:
        # Closed after the application that is started here: Serve's handles end in this loop.
        runner = stack.enter_context(asyncio.Runner())
        there = stack.enter_context(joined_application(address, runner, say))
        if there is None:  # a free port: only this run uses these pools
            own = load_settings(config, {"model": model, "router": {"port": 0}})
            settings = with_default_model(own)
            if not settings.models:  # the path of a folder is no served name
                archive = replace(archive, fields={**archive.fields, "model": ALIAS})
        else:
            settings = there[0]
        archive = replace(archive, model=model_of(settings, str(archive.fields["model"])))
        outputs = stack.enter_context(Outputs.opened(archive))
        progress = RunProgress(err)
        listing = look_at(items, outputs, progress)
        if dry_run:
            deque(listing, maxlen=0)
            out.print(_forecast(archive, progress), markup=False)
            return ALL_DONE
        with told(archive.where):
            first = next(filter(None, listing), None)
        if first is None:
            say(progress.summary())
            return _finish(archive, progress, out)
        say_if_toy({archive.model}, err)
        if there is None:
            for own in settings.by_model().values():  # may take longer than replicas may to start
                download(own.model, err)
            os.environ.setdefault(KEEP_SIGNALS, "1")
            from cluster.serve.start.launch import running_cluster

            stack.enter_context(running_cluster(settings, say=say))
        # Ray's handler would end the process at once.
        before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        stack.callback(signal.signal, signal.SIGTERM, before)

        async def work() -> None:
            async with engine_of_application(there) as engine:
                await run_archive(archive, outputs, engine, progress, chain((first,), listing))

        with progress.status, cluster_watched(progress):
            try:
                with told(archive.where):
                    runner.run(work())
            except KeyboardInterrupt:
                write_failures(archive.where, progress.failures)
                raise
            except Exception:
                time.sleep(DYING_S)  # where the cluster is ending, the watch ends the process
                raise
        return _finish(archive, progress, out)


def _finish(archive: Archive, progress: RunProgress, out: Console) -> int:
    where, n_failed = archive.where, len(progress.failures)
    with told(where):
        write_failures(where, progress.failures)
        if progress.done_s:
            speed = json.dumps({"hours_per_hour": progress.speed})
            (where / SPEED).write_whole(speed.encode())
    n_files = counted(progress.n_items, "file")
    have = "has its transcript" if progress.n_items == 1 else "have their transcripts"
    out.print(
        f"{progress.n_items - n_failed} of {n_files} {have} in {where.name}"
        + (f"; this run: {progress.line()}" if progress.n_done else ""),
        markup=False,
    )
    if n_failed:
        out.print(f"{n_failed} failed, for the reasons in {where.name}/{FAILURES}", markup=False)
    return SOME_FAILED if n_failed else ALL_DONE


def _forecast(archive: Archive, progress: RunProgress) -> str:
    if not progress.n_pending:
        return "nothing is left to do"
    speed = 0.0
    with suppress(OSError, ValueError, KeyError):
        speed = float(json.loads((archive.where / SPEED).read())["hours_per_hour"])
    if not speed:
        return f"{progress.summary()}; no run has measured yet how fast it goes here"
    left = hours(progress.about_s / speed)
    return (
        f"{progress.summary()}; at the last run's speed, {speed:.1f} hours per hour, about {left}"
    )


def model_of(settings: Settings, name: str) -> str:
    models = settings.by_model()
    for served, own in models.items():
        if name in (served, *own.served_model_names, *settings.aliases_of(served)):
            return own.model
    return next(iter(models.values())).model if name == ALIAS else name


@contextmanager
def joined_application(
    address: str | None, runner: asyncio.Runner, say: Say
) -> Iterator[Told | None]:
    """Join the Ray cluster of a running application; yield its settings and build, or None.

    None: no application runs, or NO_CLUSTER is given. Raises ConfigurationError: the given address
    has no Ray or no application, several clusters run, or the application is of another build.
    """
    is_named = address is not None
    address = address or os.environ.get("RAY_ADDRESS")
    found = {address} if address else ray_addresses_here()
    if len(found) > 1:
        raise ConfigurationError(
            f"several Ray clusters run on this machine: say which by --address, one of "
            f"{', '.join(sorted(found))}, or start another by --address {NO_CLUSTER}"
        )
    address = next(iter(found), NO_CLUSTER)
    if address == NO_CLUSTER:
        yield None
        return
    check_ray_answers(address)
    with ExitStack() as stack:
        stack.enter_context(joined_cluster(address))
        try:
            there = runner.run(application_settings())
        except ConfigurationError as error:
            none = f"there is no application in Ray at {address}: {error.message.splitlines()[0]}"
            if is_named:
                raise ConfigurationError(
                    f"{none}; put one there by `splitscribe deploy`, or start one here by "
                    f"--address {NO_CLUSTER}"
                ) from error
            say(none)
            stack.close()
            yield None
            return
        if there[1] != build_id():
            raise ConfigurationError(
                f"the application in Ray at {address} runs splitscribe {there[1]}, this is "
                f"{build_id()}: use the same, or start another by --address {NO_CLUSTER}"
            )
        # Serve logs an error when the loop of its handles is closed, as it is here.
        stack.callback(runner.close)
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        say(f"using the application in Ray at {address}")
        yield there


@contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    for name, value in {**joining_environment(), KEEP_SIGNALS: "1"}.items():
        os.environ.setdefault(name, value)
    from cluster.serve.start.ray_session import ray_session, run_folder

    with run_folder(), ray_session(address):
        yield


@contextmanager
def cluster_watched(progress: RunProgress) -> Iterator[None]:
    """End the process with a message soon after its Ray cluster has ended: Ray waits a minute."""
    from cluster.serve.start.ray_session import end_without_ray, ray_watch

    over = threading.Event()
    gone = ray_watch(over)

    def watch() -> None:
        if not gone():
            return
        progress.status.stop()
        progress.say(
            f"the Ray cluster has ended: {progress.n_before + progress.n_done} files are done "
            "and kept; the same command goes on from here"
        )
        end_without_ray(ENDED)

    threading.Thread(target=watch, daemon=True, name="cluster-watch").start()
    try:
        yield
    finally:
        over.set()

"""Which application an archive goes through: a running one that is found, or one of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster.archives.archive import Archive
from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.serve.distribution import build_id
from cluster.serve.ray_environment import joining_environment
from cluster.serve.ray_internals import KEEP_SIGNALS, ray_addresses_here
from cluster.serve.start.readiness import Say
from router.http.models import ALIAS

NO_CLUSTER = "none"


@dataclass(frozen=True, slots=True)
class BatchJob:
    """What a command line asks for. address: None looks for one, NO_CLUSTER starts one."""

    inputs: tuple[str, ...]
    archive: Archive
    model: str
    address: str | None
    config: Path | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A running application. runner: its handles belong to the event loop that asked it first."""

    settings: Settings
    runner: asyncio.Runner


@contextmanager
def found_application(job: BatchJob, say: Say) -> Iterator[Found | None]:
    """A running application, to whose Ray cluster this process belongs meanwhile.

    None: there is none, or the job does not want one.

    Raises:
        ConfigurationError: the address that was named has no Ray; several here, and none named.
    """
    address = _address(job)
    if address is not None:
        with joined_cluster(address), asyncio.Runner() as runner:
            settings = _settings_there(address, runner, say)
            if settings is not None:
                say(f"using the application in Ray at {address}")
                yield Found(settings, runner)
                return
    yield None


@contextmanager
def joined_cluster(address: str) -> Iterator[None]:
    """Make this process one of the Ray cluster at `address`, in an empty folder meanwhile."""
    for name, value in {**joining_environment(), KEEP_SIGNALS: "1"}.items():
        os.environ.setdefault(name, value)
    from cluster.serve.start.ray_session import ray_session

    with (
        tempfile.TemporaryDirectory(
            prefix="splitscribe-run-", ignore_cleanup_errors=True
        ) as folder,
        chdir(folder),
        ray_session(address, log_to_driver=False),
    ):
        yield


@contextmanager
def own_application(job: BatchJob, settings: Settings, say: Say) -> Iterator[None]:
    """Pools for this run alone, in the Ray cluster that the job names, or in one of its own.

    Raises:
        ConfigurationError: they do not start.
    """
    os.environ.setdefault(KEEP_SIGNALS, "1")
    from cluster.serve.start.launch import running_cluster

    address = job.address if job.address != NO_CLUSTER else None
    with running_cluster(settings, say=say, address=address):
        yield


def model_of(settings: Settings, name: str) -> str:
    """The checkpoint that a served name means, as the settings have it."""
    models = settings.by_model()
    for served, own in models.items():
        if name in (served, *own.served_model_names, *settings.aliases_of(served)):
            return own.model
    return next(iter(models.values())).model if name == ALIAS else name


def _address(job: BatchJob) -> str | None:
    if job.address == NO_CLUSTER:
        return None
    if job.address is not None:
        return job.address
    found = [os.environ["RAY_ADDRESS"]] if os.environ.get("RAY_ADDRESS") else ray_addresses_here()
    if len(found) > 1:
        raise ConfigurationError(
            f"several Ray clusters run on this machine: say which by --address, one of "
            f"{', '.join(sorted(found))}, or start another by --address {NO_CLUSTER}"
        )
    return next(iter(found), None)


def _settings_there(address: str, runner: asyncio.Runner, say: Say) -> Settings | None:
    from cluster.serve.bulk.application import application_settings

    try:
        settings, build = runner.run(application_settings())
    except ConfigurationError as error:
        say(f"there is no application in Ray at {address}: {error.message.splitlines()[0]}")
        return None
    if build != build_id():
        raise ConfigurationError(
            f"the application in Ray at {address} runs splitscribe {build}, this is {build_id()}: "
            f"use the same, or start another by --address {NO_CLUSTER}"
        )
    # Serve complains when the loop that its handles belong to ends, as it does with this run.
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    return settings

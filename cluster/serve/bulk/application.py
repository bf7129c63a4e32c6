"""Finds a running application in the Ray cluster of this process, and opens bulk work over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from cluster.common.errors import ConfigurationError, WorkerGoneError
from cluster.common.metrics import Recorder
from cluster.common.settings import Settings
from cluster.serve.bulk.engine import BulkEngine
from cluster.serve.deployment_names import deployment_suffixes
from cluster.serve.distribution import check_distribution
from cluster.serve.own_calls import OWN_CALLS
from cluster.serve.ray_environment import APP_NAME
from cluster.serve.serve_pool import ServePool, call_worker

STATE_S = 30.0  # for an application to tell its settings


@asynccontextmanager
async def connected_engine(
    app_name: str = APP_NAME, *, recorder: Recorder | None = None, **router: Any
) -> AsyncIterator[BulkEngine]:
    """An engine over an application that runs in the Ray cluster of this process.

    Args:
        app_name, recorder, router: see `BulkEngine.over_pools`.

    Raises:
        ConfigurationError: there is no such application here, or it runs other code than this.
    """
    from ray import serve

    settings, build = await application_settings(app_name)
    check_distribution(build)
    found = (await asyncio.to_thread(serve.status)).applications[app_name]
    pools = serve_pools(settings, found.deployments, app_name)
    async with BulkEngine.over_pools(settings, pools, recorder=recorder, **router) as engine:
        yield engine


async def application_settings(app_name: str = APP_NAME) -> tuple[Settings, str]:
    """The settings, without secrets, and the build of an application in this Ray cluster.

    Raises:
        ConfigurationError: there is none, or its routers do not answer.
    """
    from ray import serve
    from ray.serve.exceptions import RayServeException

    try:
        router: Any = await asyncio.to_thread(serve.get_app_handle, app_name)
        async with asyncio.timeout(STATE_S):
            told: tuple[Settings, str] = await call_worker(router.shared_settings.remote())
    except RayServeException as error:
        raise ConfigurationError(
            f"the Ray cluster runs no application called '{app_name}': {error}"
        ) from error
    except (TimeoutError, WorkerGoneError) as error:
        raise ConfigurationError(
            f"the routers of '{app_name}' do not tell their settings: {error or 'no answer'}"
        ) from error
    return told


def serve_pools(
    settings: Settings, deployments: Iterable[str], app_name: str = APP_NAME
) -> dict[str, tuple[ServePool, ServePool]]:
    """Handles to the pools of each model.

    deployments: names of what the application has, by which colocated workers are known.
    """
    from ray import serve

    names = set(deployments)
    pools = {}
    for model, suffix in zip(
        settings.by_model(), deployment_suffixes(settings.models), strict=True
    ):
        together = f"worker{suffix}"
        encoder, decoder = (
            (together, together) if together in names else (f"encoder{suffix}", f"decoder{suffix}")
        )
        pools[model] = (
            ServePool(serve.get_deployment_handle(encoder, app_name), "encoder", OWN_CALLS),
            ServePool(serve.get_deployment_handle(decoder, app_name), "decoder", OWN_CALLS),
        )
    return pools

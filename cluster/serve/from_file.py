"""The import path for `serve deploy`: builds the application on a node of the cluster.

Keys, placement and paths of models are resolved on that node. Serve's proxies listen, at the
address in `http_options` of the file.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from typing import Any

from cluster.common.errors import ConfigurationError
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.distribution import build_id
from cluster.serve.ray_environment import ENVIRONMENT
from cluster.serve.ray_internals import shared_value
from cluster.serve.start.readiness import state_here
from cluster.serve.start.resolve import resolved

logger = logging.getLogger("ray.serve")  # goes to the build's log in the dashboard

IMPORT_PATH = "cluster.serve.from_file:build"
KEY_NAME = b"splitscribe_cluster_key"
KEY_NAMESPACE = b"splitscribe"


def build(args: dict[str, Any]) -> Any:
    """Compose the application from `args`, which take precedence over the node's `SPLITSCRIBE_*`.

    Raises ConfigurationError, CheckpointError: `serve status` shows the message, and the previous
    version keeps serving.
    """
    import ray
    from ray import serve

    from cluster.common.model.checkpoint import open_checkpoint
    from cluster.serve.app import build_app
    from cluster.serve.placement import joined_machine, place

    settings = settings_of(args)
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        logger.warning(
            "%s not set where Ray was started: Serve runs in its slower default mode; "
            'start Ray after: eval "$(splitscribe config env)"',
            ", ".join(missing),
        )
    settings = resolved(
        settings,
        cluster_key=settings.cluster_key or _shared_key(),
        port=settings.router.port,
        listener="serve",
    )
    for own in settings.by_model().values():
        open_checkpoint(own.model, weights=False)  # fail before an old replica is stopped
    resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    placement = place(settings, joined_machine(resources.get("GPU", 0.0)))
    logger.info("splitscribe %s, placement: %s", build_id(), placement)
    state = state_here(serve.status())
    running = {pool.name: pool.running for pool in state.pools} if state is not None else {}
    return build_app(settings, build_id(), placement, running)


def settings_of(args: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """Raises ConfigurationError: one is invalid, is a secret, or belongs elsewhere in the file."""
    router, batches = (
        given if isinstance(given := args.get(name), Mapping) else {}
        for name in ("router", "batches")
    )
    if args.get("cluster_key") or router.get("api_key") or batches.get("webhook_secret"):
        raise ConfigurationError(
            "a Serve configuration is shown in the dashboard and in logs, so it holds no key: put "
            "API keys into a file on every node and its path into router.api_key_file; the "
            "cluster key is made by the cluster, or comes from SPLITSCRIBE_CLUSTER_KEY; what "
            "signs webhooks comes from SPLITSCRIBE_BATCHES__WEBHOOK_SECRET"
        )
    if misplaced := {"host", "port", "listener"} & router.keys():
        raise ConfigurationError(
            f"router.{min(misplaced)} is not for a Serve configuration, where Serve's proxies "
            "listen: set http_options.host and http_options.port of the file"
        )
    return load_settings(None, args, environ)


def _shared_key() -> str:
    # During an update, replicas of both versions verify each other's handles.
    return shared_value(KEY_NAMESPACE, KEY_NAME, secrets.token_hex(32).encode()).decode()

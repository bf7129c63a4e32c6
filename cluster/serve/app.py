"""Where the roles meet as a Serve application: `build_app` composes it for `serve.run`.

It only names the classes of the replicas: none of what they compute with is imported here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from cluster.common.messages import Role
from cluster.common.settings import DecoderSettings, EncoderSettings, Settings
from cluster.serve.bulk.batch_owner import BatchOwner
from cluster.serve.placement import Placement
from cluster.serve.ray_environment import deployment_suffixes
from cluster.serve.replicas.pool_replicas import ColocatedReplica, DecoderReplica, EncoderReplica
from cluster.serve.replicas.router_replica import Router
from router.http.admission import MAX_REQUESTS

HEALTH_PERIOD_S = 1.0
# Three checks in a row without an answer, and a replica is killed: a frozen one after 7 s or so;
# what waits for it is done by another. A check waits for no engine, only for the event loop.
HEALTH_TIMEOUT_S = 2.0
# Of routers and the batch owner: what clients send may keep their event loop busy for seconds, and
# who kills one loses all that it holds. So they have 16.5 s.
PATIENT_TIMEOUT_S = 5.5
STATS_PERIOD_S = 0.5
PACED_WORKERS = 256  # above it Serve's controller asks and hears each worker less often
UNTOLD_PERIOD_S = 3600.0  # of Serve's reports to routers, which know by their calls' answers
# How long a replica that is stopped may finish what it has. The longest decode of a window takes
# less. A request may take more, up to 600 s, and is cut when its router is stopped meanwhile.
DRAIN_S = 60.0
# Calls of a worker at a time: windows wait in the order of work (`router.window_queue`), or inside
# a worker, and never in Serve's own queue, which knows none.
UNBOUNDED = 1_000_000


def build_app(
    settings: Settings, build: str, placement: Placement, running: Mapping[str, int] | None = None
) -> Any:
    """Compose the Serve application from resolved settings.

    build: `build_id()` of this process; replicas with another one refuse. running: workers of each
    deployment that this is a new version of: Serve sets a scaled pool to the size that it is given.
    """
    from ray import serve

    deployment: Any = serve.deployment  # its overloads do not know a class with options
    pools = {
        name: _pools(deployment, own, build, suffix, placement, running or {})
        for (name, own), suffix in zip(
            settings.by_model().items(), deployment_suffixes(settings.models), strict=True
        )
    }
    encoders = {name: encoder for name, (encoder, _) in pools.items()}
    decoders = {name: decoder for name, (_, decoder) in pools.items()}
    batches, patient = None, {"health_check_timeout_s": PATIENT_TIMEOUT_S}
    if settings.batches.folder is not None:
        # One replica, and a new version begins when the old one has ended.
        options = _replica_options(0.0, settings.batches.node_labels) | patient
        batches = deployment(
            BatchOwner,
            name="batches",
            num_replicas=1,
            max_ongoing_requests=UNBOUNDED,
            **(options | {"max_surge_percent": 0}),
        ).bind(settings, build, encoders, decoders)
    front = settings.router
    options = _replica_options(0.0, front.node_labels, front.cpus, front.replicas) | patient
    return deployment(
        http_front(Router, settings),
        name="router",
        num_replicas=front.replicas,
        max_ongoing_requests=MAX_REQUESTS,
        **options,
    ).bind(settings, build, encoders, decoders, batches)


def _size(role: Role, settings: Settings, running: int) -> dict[str, Any]:
    pool = settings.encoder if role == "encoder" else settings.decoder
    if not pool.is_scaled:
        return {"num_replicas": pool.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    (model,) = settings.by_model()
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="cluster.serve.hooks:PoolPolicy",
        policy_kwargs={"role": role, "model": model, "rules": settings.scaling.model_dump()},
    )
    with warnings.catch_warnings():
        # Deprecated for environment variables that a running Ray cluster may not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=pool.fewest,
                initial_replicas=max(pool.replicas, min(running, pool.most)),
                max_replicas=pool.most,
                metrics_interval_s=pace(pool.most) * STATS_PERIOD_S,
                look_back_period_s=4 * pace(pool.most) * STATS_PERIOD_S,
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                policy=policy,
            )
        }


def pace(most: int) -> float:
    """By how much intervals are longer in a pool that may have so many workers: one process,
    Serve's controller, checks the health of all.
    """
    return max(1.0, most / PACED_WORKERS)


def replica_choice() -> dict[str, Any]:
    from ray.serve.config import RequestRouterConfig

    config: Any = RequestRouterConfig
    return {
        "request_router_config": config(
            request_router_class="cluster.serve.hooks.LoadAwareRouter",
            request_routing_stats_period_s=UNTOLD_PERIOD_S,
        )
    }


def http_front(router: type, settings: Settings) -> Any:
    """The class that is deployed for `router`: an ingress, where Serve's proxy is in front."""
    if settings.router.listener == "router":
        return router
    from ray import serve

    return serve.ingress()(router)


def _pools(
    deployment: Any,
    settings: Settings,
    build: str,
    suffix: str,
    placement: Placement,
    running: Mapping[str, int],
) -> tuple[Any, Any]:
    def options(role: EncoderSettings | DecoderSettings) -> dict[str, Any]:
        return _replica_options(placement.gpus_of(role), role.node_labels, role.cpus, role.most)

    if placement.kind == "colocated":
        worker = deployment(
            ColocatedReplica,
            name=f"worker{suffix}",
            **replica_choice(),
            max_ongoing_requests=UNBOUNDED,
            **options(settings.encoder),
        ).bind(settings, build)
        return worker, worker

    def pool(replica: type, role: Role, own: EncoderSettings | DecoderSettings) -> Any:
        name = f"{role}{suffix}"
        return deployment(
            replica,
            name=name,
            **_size(role, settings, running.get(name, 0)),
            **replica_choice(),
            max_ongoing_requests=UNBOUNDED,
            **options(own),
        ).bind(settings, build)

    return (
        pool(EncoderReplica, "encoder", settings.encoder),
        pool(DecoderReplica, "decoder", settings.decoder),
    )


def _replica_options(
    gpus: float, node_labels: Mapping[str, str], cpus: float = 0.0, most: int = 1
) -> dict[str, Any]:
    """Options that all deployments share. A worker claims no core unless told: roles share them."""
    return {
        "ray_actor_options": {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "label_selector": dict(node_labels),
        },
        "health_check_period_s": pace(most) * HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        # A new version starts one worker more, and stops an old one when that is ready: one that
        # cannot start replaces nothing. Not where it would wait for what the old ones claim.
        "max_surge_percent": 0 if gpus or cpus else 1,
    }

"""Compose routers, workers and the batch owner as one Ray Serve application.

Only the replicas' classes are imported here, not the libraries that they compute with.
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
# After three checks in a row without an answer Serve kills a replica, a frozen one after about 7 s.
# A check waits for the event loop, never for an engine.
HEALTH_TIMEOUT_S = 2.0
# Routers and the batch owner have 16.5 s: clients' uploads may keep their event loop busy for
# seconds, and a killed one loses all of its requests.
PATIENT_TIMEOUT_S = 5.5
STATS_PERIOD_S = 0.5
PACED_WORKERS = 256  # above it Serve's controller polls each worker less often
UNTOLD_PERIOD_S = 3600.0  # of Serve's reports to routers, which use the answers of their own calls
# Time for a stopped replica to finish its work. Decoding a window takes less; a request may take up
# to 600 s, and fails if its router is stopped meanwhile.
DRAIN_S = 60.0
# Concurrent calls of a worker: windows wait in `router.window_queue` or inside a worker, never in
# Serve's own queue, which is FIFO.
UNBOUNDED = 1_000_000


def build_app(
    settings: Settings, build: str, placement: Placement, running: Mapping[str, int] | None = None
) -> Any:
    """settings: resolved. build: `build_id()` here; replicas of another build refuse to start.

    running: workers of each deployment now, with which a new version starts its scaled pools.
    """
    from ray import serve

    deployment: Any = serve.deployment  # its overloads lack a class with options
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
        # One replica: a new version starts after the old one has ended.
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
        # Deprecated in favour of environment variables, which a running Ray cluster may lack.
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
    """Return the factor by which Serve's controller polls a pool of `most` workers less often."""
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
    """cpus: 0 lets workers share all cores."""
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
        # A new version first starts one additional worker, and an old one stops when it is ready.
        # If workers claim cores or GPUs, the new one would wait for those of the old ones.
        "max_surge_percent": 0 if gpus or cpus else 1,
    }

"""The only place where the roles meet: as a Serve application, or in one process.

`build_app` composes router, encoder pool and decoder pool for `serve.run`, each role in workers of
its own or both in one (`replicas.colocated_replica`). `local_transcriber` builds the same path in
this process, with the in-memory transport, for offline transcription.
"""

from __future__ import annotations

import asyncio
import os
import re
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from cluster.errors import ConfigurationError
from cluster.kv.payloads import make_exporters, make_handoff_importer
from cluster.kv.wires.gpu_memory import gpu_budget
from cluster.messages import Role, WorkerStatus
from cluster.metrics import Recorder
from cluster.model.checkpoint import Checkpoint, open_checkpoint
from cluster.model.device import resolve_device
from cluster.model.tokenizer import WhisperTokenizer
from cluster.serve.placement import Placement
from cluster.serve.replicas.colocated_replica import EXPORT_PORTION, ColocatedReplica
from cluster.serve.replicas.decoder_replica import DecoderReplica
from cluster.serve.replicas.encoder_replica import EncoderReplica
from cluster.serve.replicas.router_replica import Router
from cluster.settings import Settings
from decoder_worker import sizing as decoder_sizing
from decoder_worker.engine import DecoderEngine
from encoder_worker import sizing as encoder_sizing
from encoder_worker.engine import EncoderEngine
from router.audio.pool import AudioPool
from router.clients import EnginePool
from router.http.admission import MAX_REQUESTS
from router.request import RequestTranscriber

HEALTH_PERIOD_S = 1.0
# Three checks in a row without an answer, and a replica is killed: a frozen one after 7 s or so;
# what waits for it is done by another. A check waits for no engine, only for the event loop.
HEALTH_TIMEOUT_S = 2.0
STATS_PERIOD_S = 0.5
# How long a replica that is stopped may finish what it has. The longest decode of a window takes
# less. A request may take more, up to 600 s, and is cut when its router is stopped meanwhile.
DRAIN_S = 60.0
DEEPEST_BATCH = 16  # of any encoder whose batch follows its device
UNBOUNDED = 1_000_000


def build_app(settings: Settings, build: str, placement: Placement) -> Any:
    """Compose the Serve application.

    Args:
        settings: resolved (cluster key and port filled in).
        build: `cluster.serve.distribution.build_id()` of this process; replicas with another
            refuse.
        placement: of these settings.
    """
    from ray import serve

    deployment: Any = serve.deployment  # its overloads do not know a class with options
    pools = {
        name: _pools(deployment, own, build, suffix, placement)
        for (name, own), suffix in zip(
            settings.by_model().items(), deployment_suffixes(settings.models), strict=True
        )
    }
    return deployment(
        http_front(Router, settings),
        name="router",
        num_replicas=settings.router.replicas,
        max_ongoing_requests=MAX_REQUESTS,
        **_replica_options(0.0, settings.router.node_labels, settings.router.cpus),
    ).bind(
        settings,
        build,
        {name: encoder for name, (encoder, _) in pools.items()},
        {name: decoder for name, (_, decoder) in pools.items()},
    )


def _size(role: Role, settings: Settings) -> dict[str, Any]:
    """How many replicas a pool has; the policy is made in Serve's controller."""
    pool = settings.encoder if role == "encoder" else settings.decoder
    if not pool.is_scaled:
        return {"num_replicas": pool.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    (model,) = settings.by_model()
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="cluster.serve.hooks.autoscaling:PoolPolicy",
        policy_kwargs={
            "role": role,
            "model": model,
            "rules": settings.scaling.model_dump(),
        },
    )
    with warnings.catch_warnings():
        # Deprecated for environment variables that a running Ray cluster may not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        return {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=pool.fewest,
                initial_replicas=pool.replicas,
                max_replicas=pool.most,
                metrics_interval_s=STATS_PERIOD_S,
                look_back_period_s=4 * STATS_PERIOD_S,
                upscale_delay_s=0.0,
                downscale_delay_s=0.0,
                policy=policy,
            )
        }


def replica_choice() -> dict[str, Any]:
    """Options of a pool whose workers are chosen by their load (`cluster.serve.routing`)."""
    from ray.serve.config import RequestRouterConfig

    config: Any = RequestRouterConfig
    return {
        "request_router_config": config(
            request_router_class="cluster.serve.hooks.replica_choice.LoadAwareRouter",
            request_routing_stats_period_s=STATS_PERIOD_S,
        )
    }


def http_front(router: type, settings: Settings) -> Any:
    """The class that is deployed for `router`: an ingress, where Serve's proxy is in front."""
    if settings.router.listener == "router":
        return router
    from ray import serve

    return serve.ingress()(router)


def _pools(
    deployment: Any, settings: Settings, build: str, suffix: str, placement: Placement
) -> tuple[Any, Any]:
    """The encoder pool and the decoder pool of one model; the same one where they are colocated."""
    encoder_options = _replica_options(
        placement.gpus_of(settings.encoder), settings.encoder.node_labels
    )
    if placement.kind == "colocated":
        worker = deployment(
            ColocatedReplica,
            name=f"worker{suffix}",
            # Each engine has a bound of its own. With one for both, windows that wait for pages
            # could keep out the decodes that would free them.
            max_ongoing_requests=UNBOUNDED,
            **encoder_options,
        ).bind(settings, build)
        return worker, worker
    encoder = deployment(
        EncoderReplica,
        name=f"encoder{suffix}",
        **_size("encoder", settings),
        **replica_choice(),
        # Windows queue inside the replica by deadline, so Serve's own queue must stay shallow.
        max_ongoing_requests=4 * (settings.encoder.max_batch or DEEPEST_BATCH),
        **encoder_options,
    ).bind(settings, build)
    decoder = deployment(
        DecoderReplica,
        name=f"decoder{suffix}",
        **_size("decoder", settings),
        **replica_choice(),
        max_ongoing_requests=settings.decoder.max_waiting + settings.decoder.max_batch,
        **_replica_options(placement.gpus_of(settings.decoder), settings.decoder.node_labels),
    ).bind(settings, build)
    return encoder, decoder


def deployment_suffixes(models: Iterable[str]) -> list[str]:
    """What is put behind the names of each model's deployments: nothing where there is one model.

    "a/b" and "a b" become "-a-b" and "-a-b-2".
    """
    found: list[str] = []
    for name in models:
        slug = suffix = "-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        number = 1
        while suffix in found:
            number += 1
            suffix = f"{slug}-{number}"
        found.append(suffix)
    return found or [""]


def _replica_options(
    gpus: float, node_labels: Mapping[str, str], cpus: float = 0.0
) -> dict[str, Any]:
    """Options that all deployments share. A CPU worker claims no core: roles share them."""
    return {
        "ray_actor_options": {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "label_selector": dict(node_labels),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}},
        },
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": DRAIN_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        # A new version starts one worker more, and stops an old one when that is ready: one that
        # cannot start replaces nothing. Not where it would wait for what the old ones claim.
        "max_surge_percent": 0 if gpus or cpus else 1,
    }


def sized_together(settings: Settings, checkpoint: Checkpoint, device: str) -> Settings:
    """Both pools' sizes filled in, for one process: the decoder's takes what the encoder leaves."""
    budget = gpu_budget(device)
    settings = encoder_sizing.sized(settings, checkpoint, device, budget, EXPORT_PORTION)
    if budget is not None:
        budget = budget.less(encoder_sizing.taken_bytes(settings, checkpoint, device))
    return decoder_sizing.sized(settings, checkpoint, device, budget)


def on_one_device(settings: Settings) -> Settings:
    """Both roles on the same device, resolved; a role that asks for "auto" follows the other one.

    Raises:
        ConfigurationError: they ask for different devices, or for one that is not there.
    """
    asked = {settings.encoder.device, settings.decoder.device} - {"auto"}
    if len(asked) > 1:
        raise ConfigurationError(
            f"one process has one device: encoder.device is {settings.encoder.device!r}, "
            f"decoder.device {settings.decoder.device!r}"
        )
    device = {"device": resolve_device(asked.pop() if asked else "auto")}
    return settings.model_copy(
        update={
            "encoder": settings.encoder.model_copy(update=device),
            "decoder": settings.decoder.model_copy(update=device),
        }
    )


@asynccontextmanager
async def local_transcriber(
    settings: Settings, recorder: Recorder | None = None
) -> AsyncIterator[RequestTranscriber]:
    """Both roles in this process, KV moved in memory; closed cleanly at the end.

    Raises:
        ConfigurationError: settings and checkpoint do not fit each other or this machine.
    """
    checkpoint = await asyncio.to_thread(open_checkpoint, settings.model)
    settings = on_one_device(settings)
    device = settings.encoder.device
    settings = sized_together(settings, checkpoint, device)
    own = settings.model_copy(update={"transport": "memory", "cluster_key": os.urandom(32).hex()})
    # Each part is closed after those that use it, also where a later one does not start.
    async with AsyncExitStack() as started:
        exporters = make_exporters(checkpoint, own, device, "encoder")
        for exporter in exporters:
            started.push_async_callback(asyncio.to_thread, exporter.close)
        importer = make_handoff_importer(checkpoint, own, device, "decoder")
        started.push_async_callback(asyncio.to_thread, importer.close)
        encoder = EncoderEngine(checkpoint, exporters[0], settings.encoder, None, *exporters[1:])
        started.push_async_callback(asyncio.to_thread, encoder.close)
        decoder = DecoderEngine(checkpoint, importer, settings.decoder)
        started.push_async_callback(asyncio.to_thread, decoder.close)
        audio = AudioPool(settings.router)
        await audio.start()
        started.push_async_callback(audio.close)
        yield RequestTranscriber(
            audio,
            EnginePool(encoder.submit, _status_of(encoder, checkpoint, device)),
            EnginePool(decoder.submit, _status_of(decoder, checkpoint, device)),
            WhisperTokenizer.from_checkpoint(checkpoint),
            settings.router,
            recorder,
            dims=checkpoint.dims,
        )


def _status_of(
    engine: EncoderEngine | DecoderEngine, checkpoint: Checkpoint, device: str
) -> Callable[[], WorkerStatus]:
    """What tells the status of an engine in this process."""
    return lambda: engine.stats().as_status(
        replica=f"local-{os.getpid()}",
        model=checkpoint.name,
        transport="memory",
        device=device,
        healthy=engine.healthy() is None,
    )

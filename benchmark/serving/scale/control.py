"""What is decided and shown of N workers: one scaling decision, one answer of /health, metrics."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastapi.responses import JSONResponse

from benchmark.serving.scale.figures import SIZES, Figure, cpu_us
from cluster.messages import WorkerStatus
from cluster.metrics import DECODER_METRICS, ENCODER_METRICS, ROUTER_METRICS
from cluster.serve.hooks.autoscaling import PoolPolicy
from cluster.serve.serve_pool import N_ASKED
from router.http.models import together
from router.interface import HealthReport, PoolHealth

STATUS = WorkerStatus(
    "encoder-abcdefgh", "encoder", True, "openai/whisper-large-v3", "nixl/rc", "cuda", 60, 64, 3, 8
)


def measure() -> list[Figure]:
    figures: list[Figure] = []
    for size in SIZES:
        decide, told = _decision(size)
        ceiling = cpu_us(partial(_sums, told)) / 1000
        ours = cpu_us(decide) / 1000
        figures.append(Figure("one scaling decision", size, "ms", ceiling, ours))
    for name, shown in (("all workers", None), ("some of a large pool", N_ASKED)):
        for size in SIZES:
            ours = cpu_us(partial(_health, size, shown or size)) / 1000
            figures.append(Figure(f"/health that shows {name}", size, "ms", None, ours))
    for name, metrics in (
        ("a router", ROUTER_METRICS),
        ("an encoder", ENCODER_METRICS),
        ("a decoder", DECODER_METRICS),
    ):
        figures.append(Figure(f"metrics declared by {name}", 1, "metrics", None, len(metrics)))
    return figures


def _sums(told: dict[str, dict[str, float]]) -> list[float]:
    return [sum(values.values()) for values in told.values()]


def _decision(size: int) -> tuple[Any, dict[str, dict[str, float]]]:
    from cluster.settings import ScalingSettings

    names = [f"encoder#{number:05d}" for number in range(size)]
    told = {
        "busy": dict.fromkeys(names, 0.7),
        "queue_s": dict.fromkeys(names, 0.2),
        "slack_s": dict.fromkeys(names, 30.0),
        "unread": dict.fromkeys(names, 0.1),
    }
    context: Any = SimpleNamespace(
        app_name="scale",
        deployment_name="encoder",
        target_num_replicas=size,
        running_replicas=names,
        total_num_requests=float(size),
        total_queued_requests=0.0,
        aggregated_metrics=told,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=2 * size,
        current_time=0.0,
    )
    policy = PoolPolicy("encoder", f"scale-{size}", ScalingSettings().model_dump())

    def decide() -> None:
        context.current_time += 0.5
        policy(context)

    return decide, told


def _health(size: int, shown: int) -> bytes:
    """As the route makes it of what the workers said."""
    pool = PoolHealth(True, size, (STATUS,) * min(shown, size))
    whole = together((HealthReport(True, {"encoder": pool, "decoder": pool}),))
    body = {"pools": {role: asdict(one) for role, one in whole.pools.items()}}
    return bytes(JSONResponse(body).body)

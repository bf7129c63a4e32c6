"""The endpoints for probes and for Prometheus.

`/metrics` has the state of the pools and the metrics of `cluster.common.metrics`, which Ray exports
as `ray_<name>`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.params import Depends
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from cluster.common.metrics import MetricSpec
from router.http.access import METRICS
from router.http.admission import Admission
from router.http.realtime.service import RealtimeService
from router.http.shared import Shared

WORKER_GAUGES = {
    "healthy": "1 while a worker is healthy, else 0",
    "queued": "Windows that wait in a worker",
    "running": "Windows that a worker works on",
    "pages_free": "Free pages of a worker's KV pool",
    "pages_total": "Pages of a worker's KV pool",
}


def add_probes(
    app: FastAPI, shared: Shared, admission: Admission, realtime: RealtimeService
) -> None:
    probes = APIRouter(tags=["operations"])

    @probes.get("/livez", summary="Whether the router runs", response_class=PlainTextResponse)
    async def livez() -> str:
        return "ok"

    @probes.get(
        "/readyz",
        summary="Whether the router may be sent requests",
        response_class=PlainTextResponse,
        responses={503: {"description": "Not yet, or no more: it stops."}},
    )
    async def readyz() -> PlainTextResponse:
        """200 once all pools are ready, 503 before, and when the router stops."""
        if realtime.draining.is_set():
            return PlainTextResponse("stopping", 503)
        status = (await shared.registry.health())["status"]
        return PlainTextResponse(status, 200 if status == "ready" else 503)

    @probes.get("/version", summary="The version of splitscribe")
    async def tell_version() -> dict[str, str]:
        return {"version": version("splitscribe")}

    @probes.get(
        "/health",
        summary="The state of the router, the models and their workers",
        response_model=None,
        responses={503: {"description": "Not ready; the body has the same shape."}},
    )
    async def health() -> JSONResponse:
        """200 once all pools are ready, 503 before; every model and worker either way."""
        body = await shared.registry.health()
        body["router"] = {
            "requests": admission.requests,
            "pending_audio_s": round(admission.pending_audio_s, 1),
            "realtime_sessions": realtime.sessions,
            "max_upload_bytes": shared.settings.max_upload_bytes,
        }
        return JSONResponse(body, 200 if body["status"] == "ready" else 503)

    app.include_router(probes)


def add_metrics(app: FastAPI, shared: Shared, guards: Sequence[Depends]) -> None:
    """Add `/metrics`, and make the recorder update its metrics, too."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    collected = CollectorRegistry()
    ProcessCollector(registry=collected)
    Info("splitscribe", "This router", registry=collected).info({"version": version("splitscribe")})
    pools = _Pools()
    collected.register(pools)
    shared.recorder.tell_also(lambda spec: _Metric(spec, collected))
    operations = APIRouter(tags=["operations"], dependencies=guards)

    @operations.get(METRICS, summary="Metrics for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        pools.known = await shared.registry.health()
        encode, media_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(collected), headers={"content-type": media_type})

    app.include_router(operations)


class _Metric:
    def __init__(self, spec: MetricSpec, collected: CollectorRegistry) -> None:
        names: dict[str, Any] = {"labelnames": spec.tags, "registry": collected}
        self._metric: Any
        match spec.kind:
            case "counter":
                self._metric = Counter(spec.name, spec.help, **names)
            case "gauge":
                self._metric = Gauge(spec.name, spec.help, **names)
            case "histogram":
                self._metric = Histogram(spec.name, spec.help, buckets=spec.bounds, **names)

    def inc(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._of(tags).inc(value)

    def set(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._of(tags).set(value)

    def observe(self, value: float, tags: Mapping[str, str] | None = None) -> None:
        self._of(tags).observe(value)

    def _of(self, tags: Mapping[str, str] | None) -> Any:
        return self._metric.labels(**tags) if tags else self._metric


class _Pools:
    """Gauges of the pools, made anew for each scrape, since workers come and go."""

    known: Mapping[str, Any]  # the result of `ModelRegistry.health`

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # called at registration, when nothing is known

    def collect(self) -> Iterator[GaugeMetricFamily]:
        models = self.known["models"]
        ready = GaugeMetricFamily(
            "splitscribe_ready", "1 while a model can be used, else 0", labels=["model"]
        )
        workers = GaugeMetricFamily(
            "splitscribe_workers", "Workers of a pool", labels=["model", "role"]
        )
        for name, model in models.items():
            ready.add_metric([name], model["status"] == "ready")
            for role, n_workers in model["replicas"].items():
                workers.add_metric([name, role], n_workers)
        yield from (ready, workers)
        asked = [one for pool in self.known["pools"].values() for one in pool["workers"]]
        for field, help_text in WORKER_GAUGES.items():
            name, labels = f"splitscribe_worker_{field}", ["model", "role", "worker"]
            gauge = GaugeMetricFamily(name, help_text, labels=labels)
            for one in asked:
                gauge.add_metric([one["model"], one["role"], one["replica"]], one[field])
            yield gauge

"""What the workers of both pools have in common: a thin shell around an engine.

It tells status, signals and metrics, and on shutdown finishes what is there before it frees.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, ClassVar

from cluster.common.errors import WorkerError
from cluster.common.heap import give_memory_back
from cluster.common.messages import DecodeRequest, EncodeRequest, WorkerStatus
from cluster.common.metrics import MetricSpec, report_each_second
from cluster.common.settings import Settings
from cluster.common.tracing import Span, make_tracer
from cluster.serve.replicas.replica_setup import own_location, start_replica

if TYPE_CHECKING:
    from cluster.common.kv.exporter import KVExporter
    from cluster.common.kv.importer import KVImporter
    from decoder_worker.engine import DecoderEngine
    from encoder_worker.engine import EncoderEngine

logger = logging.getLogger(__name__)

# For what is queued and leased. A decoder renews the lease of KV that waits with it, so a lease may
# last longer than this; its window is then encoded again elsewhere.
ENGINE_DRAIN_S = 30.0
UNWELL = "windows fail here again and again, and others do the same windows"


class PoolWorker:
    """A subclass's constructor calls `_start`, makes `_kv` and its engine, and calls `_ready`."""

    ROLE: ClassVar[str]
    METRICS: ClassVar[tuple[MetricSpec, ...]]

    _engine: EncoderEngine | DecoderEngine
    _kv: KVExporter | KVImporter

    def _start(self, settings: Settings, build: str) -> None:
        """Call before torch is imported. Raises ConfigurationError, as `start_replica` does."""
        # Ray says 1 where a worker claims no core. To say otherwise to Ray, as a runtime
        # environment, would keep the replica out of the processes that Ray has started ahead.
        os.environ["OMP_NUM_THREADS"] = str(os.cpu_count() or 1)
        self._name, self._recorder = start_replica(self.ROLE, settings, build, self.METRICS)
        self._is_unwell = False

    def _ready(self, settings: Settings, model: str, device: str) -> None:
        self._model, self._device, self._location = model, device, own_location()
        self._tracer = make_tracer(settings, self.ROLE, self._name)
        self._reporting = asyncio.get_running_loop().create_task(report_each_second(self._report))
        give_memory_back()
        logger.info("ready: %s on %s, KV by %s", model, device, self._kv.transport)

    def _report(self) -> None:
        raise NotImplementedError

    def _span(self, request: EncodeRequest | DecodeRequest) -> Span:
        if request.unwell and f"-{request.unwell}-" in self._name:
            self._is_unwell = True
        return self._tracer.span(
            self.ROLE,
            request.traceparent,
            "server",
            window=request.window,
            attempt=request.tries,
            replica=self._name,
        )

    async def status(self) -> WorkerStatus:
        return self._engine.stats().as_status(
            replica=self._name,
            model=self._model,
            transport=self._kv.transport,
            device=self._device,
            healthy=self._unhealthy() is None,
        )

    def check_health(self) -> None:
        if reason := self._unhealthy():
            raise WorkerError(reason)

    def _unhealthy(self) -> str | None:
        """None when well, else why not."""
        return self._engine.healthy() or (UNWELL if self._is_unwell else None)

    async def shut_down(self) -> None:
        """Take nothing new, finish what is here, then free everything."""
        if not hasattr(self, "_reporting"):
            return  # the constructor failed
        self._reporting.cancel()
        if not await asyncio.to_thread(self._engine.drain, ENGINE_DRAIN_S):
            logger.warning("shutting down with windows unfinished, or still leased")
        await asyncio.to_thread(self._engine.close)
        await asyncio.to_thread(self._kv.close)
        await asyncio.to_thread(self._tracer.close)

"""The encoder's Serve replica: a thin shell around `EncoderEngine`.

It hands windows in and handles out, reports status and metrics, and on shutdown waits until
its exported pages are free. It knows Serve; the engine does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import asdict, replace

from cluster.errors import WorkerError
from cluster.kv.gpu_memory import gpu_budget
from cluster.kv.handoff import make_exporters
from cluster.logs import request_scope, told
from cluster.messages import SAMPLE_RATE, EncodeReply, EncodeRequest, WorkerStatus
from cluster.metrics import ENCODER_METRICS
from cluster.model.checkpoint import open_checkpoint
from cluster.model.device import resolve_device
from cluster.replica import (
    BusyShare,
    gpu_share,
    own_place,
    report_each_second,
    start_replica,
)
from cluster.settings import Settings
from cluster.tracing import Span, make_tracer
from encoder_worker.engine import EncoderEngine
from encoder_worker.memory import sized

logger = logging.getLogger(__name__)

DRAIN_S = 30.0  # leases live 10 s from their last renewal, so this is enough for all of them


class EncoderWorker:
    """Serve deployment class of the encoder pool."""

    def __init__(self, settings: Settings, build: str, portion: float = 1.0) -> None:
        """portion: see `encoder_worker.memory.sized`."""
        self._name, self._recorder = start_replica("encoder", settings, build, ENCODER_METRICS)
        checkpoint = open_checkpoint(settings.model)
        self._device = resolve_device(settings.encoder.device)
        budget = gpu_budget(self._device, gpu_share())
        settings = sized(settings, checkpoint, self._device, budget, portion)
        role = settings.encoder
        self._exporters = make_exporters(
            checkpoint,
            settings,
            self._device,
            cluster_key=(settings.cluster_key or "").encode(),
            name=self._name,
        )
        self._engine = EncoderEngine(
            checkpoint, self._exporters[0], role, self._recorder, *self._exporters[1:]
        )
        self._model, self._place = checkpoint.name, own_place()
        self._busy = BusyShare()
        self._tracer = make_tracer(settings, "encoder", self._name)
        self._reporting = asyncio.get_running_loop().create_task(report_each_second(self._report))
        logger.info(
            "ready: %s on %s, KV by %s", self._model, self._device, self._exporters[0].transport
        )

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Encode one window; cancelling the call takes it out of the queue."""
        with request_scope(request.request_id), self._span(request) as span:
            arrived_s = time.monotonic()
            reply = await self._reply(request)
            timings, audio_s = reply.timings, request.n_samples / SAMPLE_RATE
            logger.info(
                "window %d encoded at attempt %d: %.1f s of audio, batch of %d, "
                "%.0f ms in queue, %.0f ms",
                request.window,
                request.attempt,
                audio_s,
                timings.batch_size,
                1000 * timings.queue_s,
                1000 * timings.encode_s,
                extra=told(
                    window=request.window,
                    attempt=request.attempt,
                    audio_s=audio_s,
                    batch=timings.batch_size,
                    queue_s=timings.queue_s,
                    encode_s=timings.encode_s,
                ),
            )
            span.stage("encoder queue", arrived_s, timings.queue_s)
            begun_s = arrived_s + timings.queue_s
            span.stage("encode batch", begun_s, timings.encode_s, windows=timings.batch_size)
            return replace(reply, place=self._place)

    def _span(self, request: EncodeRequest) -> Span:
        return self._tracer.span(
            "encoder",
            request.traceparent,
            "server",
            window=request.window,
            attempt=request.attempt,
            replica=self._name,
        )

    async def _reply(self, request: EncodeRequest) -> EncodeReply:
        future = self._engine.submit(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The reply may have come in the same moment: nobody will read those pages.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._engine.revoke(future.result().handle)
            raise

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For `cluster.serve_policy`."""
        stats = self._engine.stats()
        return asdict(stats.signals(self._busy.share(stats.encode_s)))

    def record_routing_stats(self) -> dict[str, float]:
        """For `cluster.serve_router`; Serve asks twice a second."""
        return self._engine.stats().load.as_stats()

    async def status(self) -> WorkerStatus:
        return self._engine.stats().as_status(
            replica=self._name,
            model=self._model,
            transport=self._exporters[0].transport,
            device=self._device,
            healthy=self._engine.healthy() is None,
        )

    def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        if reason := self._engine.healthy():
            raise WorkerError(reason)

    async def shut_down(self) -> None:
        """Nothing new, finish, wait for readers, then free."""
        if not hasattr(self, "_engine"):
            return  # the constructor failed
        self._reporting.cancel()
        if not await asyncio.to_thread(self._engine.drain, DRAIN_S):
            logger.warning("shutting down with windows still leased")
        await asyncio.to_thread(self._engine.close)
        for exporter in self._exporters:
            await asyncio.to_thread(exporter.close)
        await asyncio.to_thread(self._tracer.close)

    async def __del__(self) -> None:
        """Serve's hook on shutdown."""
        await self.shut_down()

    def _report(self) -> None:
        stats, recorder = self._engine.stats(), self._recorder
        recorder.set("splitscribe_encoder_queue_windows", stats.queued)
        recorder.set("splitscribe_encoder_queue_audio_seconds", stats.queued_audio_s)
        recorder.set("splitscribe_encoder_running_windows", stats.running)
        recorder.set("splitscribe_export_pages", stats.pages_total)
        recorder.set("splitscribe_export_pages_free", stats.pages_free)
        recorder.set("splitscribe_export_leases", stats.leases)
        recorder.total("splitscribe_encoder_busy_seconds_total", stats.encode_s)
        failed = {"expired": stats.expired, "failed": stats.failed - stats.expired}
        for reason, total in failed.items():
            recorder.total("splitscribe_encoder_failed_windows_total", total, reason=reason)
        expired, refused = 0, Counter[str]()
        for exporter in self._exporters:
            expired += exporter.n_expired
            refused.update(exporter.refused())
        recorder.total("splitscribe_expired_leases_total", expired)
        for reason, total in refused.items():
            recorder.total("splitscribe_refused_notifications_total", total, reason=reason)

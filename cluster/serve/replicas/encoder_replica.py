"""The encoder's Serve replica: hands windows into `EncoderEngine`, and handles of KV out.

What computes is imported by the replica itself: whoever starts a cluster only names the class.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from cluster.common.logs import log_fields, request_scope
from cluster.common.messages import SAMPLE_RATE, EncodeReply, EncodeRequest
from cluster.common.metrics import ENCODER_METRICS
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.serve.replicas.pool_worker import PoolWorker
from cluster.serve.replicas.replica_setup import BusyShare, gpu_share

if TYPE_CHECKING:
    from cluster.common.kv.exporter import KVExporter
    from encoder_worker.engine import EncoderEngine

logger = logging.getLogger(__name__)


class EncoderWorker(PoolWorker):
    ROLE = "encoder"
    METRICS = ENCODER_METRICS

    _engine: EncoderEngine
    _kv: KVExporter

    def __init__(
        self, settings: Settings, build: str, portion: float = 1.0, *, waits: bool = True
    ) -> None:
        """portion: see `encoder_worker.sizing.sized`.

        waits: for its kernels; False where a decoder of the same process does for all.
        """
        self._start(settings, build)
        from cluster.common.kv.connect import make_exporter
        from cluster.common.kv.pool import gpu_budget
        from cluster.common.model.device import resolve_device
        from encoder_worker.engine import EncoderEngine
        from encoder_worker.sizing import sized

        checkpoint = open_checkpoint(settings.model)
        device = resolve_device(settings.encoder.device)
        budget = gpu_budget(device, gpu_share())
        settings = sized(settings, checkpoint, device, budget, portion)
        role = settings.encoder
        self._kv = make_exporter(checkpoint, settings, device, self._name)
        self._engine = EncoderEngine(checkpoint, self._kv, role, self._recorder, waits=waits)
        self._busy, self._bulk_busy = BusyShare(), BusyShare()
        self._ready(settings, checkpoint.name, device)

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Cancelling the call takes it out of the queue."""
        with request_scope(request.request_id), self._span(request) as span:
            arrived_s = time.monotonic()
            reply = await self._reply(request)
            timings, audio_s = reply.timings, request.n_samples / SAMPLE_RATE
            logger.info(
                "window %d %s at attempt %d: %.1f s of audio, batch of %d, "
                "%.0f ms in queue, %.0f ms",
                request.window,
                "found encoded" if reply.reused else "encoded",
                request.tries,
                audio_s,
                timings.batch_size,
                1000 * timings.queue_s,
                1000 * timings.encode_s,
                extra=log_fields(
                    window=request.window,
                    attempt=request.tries,
                    audio_s=audio_s,
                    batch=timings.batch_size,
                    queue_s=timings.queue_s,
                    encode_s=timings.encode_s,
                    reused=bool(reply.reused),
                ),
            )
            span.stage("encoder queue", arrived_s, timings.queue_s)
            begun_s = arrived_s + timings.queue_s
            if not reply.reused:
                span.stage("encode batch", begun_s, timings.encode_s, windows=timings.batch_size)
            span.note(reused=bool(reply.reused))
            return replace(reply, location=self._location, load=self._engine.load())

    async def _reply(self, request: EncodeRequest) -> EncodeReply:
        future = self._engine.submit(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The reply may have come at the same moment, and nobody will read its pages.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._engine.revoke(future.result().handle)
            raise

    def record_autoscaling_stats(self) -> dict[str, float]:
        stats = self._engine.stats()
        busy = self._busy.share(stats.encode_s - stats.bulk_s)
        return asdict(stats.signals(busy, self._bulk_busy.share(stats.bulk_s)))

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
        recorder.total("splitscribe_cache_windows_total", stats.hits, result="hit")
        recorder.total("splitscribe_cache_windows_total", stats.misses, result="miss")
        recorder.total("splitscribe_cache_evictions_total", stats.evicted)
        recorder.set("splitscribe_cache_kept_windows", stats.kept)
        recorder.set("splitscribe_cache_kept_bytes", stats.kept_bytes)
        recorder.total("splitscribe_expired_leases_total", self._kv.n_expired)
        for reason, total in self._kv.refused().items():
            recorder.total("splitscribe_refused_notifications_total", total, reason=reason)


class EncoderReplica(EncoderWorker):
    async def __del__(self) -> None:
        await self.shut_down()

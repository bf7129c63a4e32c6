"""The workers of both pools, which connect an engine to Serve, logs, metrics and traces.

The engines are imported by the constructors, so that the starting process can name the classes
without loading torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

from cluster.common.cores import usable_cores
from cluster.common.errors import WorkerError
from cluster.common.heap import give_memory_back
from cluster.common.logs import log_fields, request_scope
from cluster.common.messages import (
    SAMPLE_RATE,
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    Role,
    WorkerStatus,
)
from cluster.common.metrics import (
    DECODER_METRICS,
    ENCODER_METRICS,
    MetricSpec,
    report_each_second,
)
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.common.tracing import Span, make_tracer
from cluster.serve.replicas.replica_setup import BusyShare, gpu_share, own_node, start_replica

if TYPE_CHECKING:
    from cluster.common.kv.exporter import KVExporter
    from cluster.common.kv.importer import KVImporter
    from cluster.common.kv.pool import GpuBudget
    from decoder_worker.engine import DecoderEngine
    from encoder_worker.engine import EncoderEngine

logger = logging.getLogger(__name__)

# Time to finish queued windows and leases. A decoder renews the leases of its waiting KV, so one
# may last longer; its window is then encoded again elsewhere.
ENGINE_DRAIN_S = 30.0
UNWELL = "windows fail here again and again, and others do the same windows"
SWITCH_S = 0.0005  # longer than the launch of a step
EXPORT_PORTION = 0.25  # of a GPU's free memory, if the decoder's pool follows


class PoolWorker:
    """A subclass's constructor calls `_start`, makes `_kv` and `_engine`, and calls `_ready`."""

    ROLE: ClassVar[Role]
    METRICS: ClassVar[tuple[MetricSpec, ...]]

    _engine: EncoderEngine | DecoderEngine
    _kv: KVExporter | KVImporter

    def _start(self, settings: Settings, build: str) -> GpuBudget | None:
        """Call this before torch is imported. Raises the ConfigurationError of `start_replica`."""
        # Ray sets 1 for a worker that claims no core. A runtime environment could change it, but
        # would keep the replica out of the processes that Ray has started ahead.
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())
        self._name, self._recorder = start_replica(self.ROLE, settings, build, self.METRICS)
        self._is_unwell = False
        from cluster.common.kv.pool import gpu_budget
        from cluster.common.model.device import resolve_device

        self._checkpoint = open_checkpoint(settings.model)
        self._device = resolve_device(getattr(settings, self.ROLE).device)
        return gpu_budget(self._device, gpu_share())

    def _ready(self, settings: Settings) -> None:
        self._node = own_node()
        self._tracer = make_tracer(settings, self.ROLE, self._name)
        self._reporting = asyncio.get_running_loop().create_task(report_each_second(self._report))
        give_memory_back()
        model, transport = self._checkpoint.name, self._kv.transport
        logger.info("ready: %s on %s, KV by %s", model, self._device, transport)

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
            model=self._checkpoint.name,
            transport=self._kv.transport,
            device=self._device,
            healthy=self._unhealthy() is None,
        )

    def check_health(self) -> None:
        if reason := self._unhealthy():
            raise WorkerError(reason)

    def _unhealthy(self) -> str | None:
        """Return the reason, or None if healthy."""
        return self._engine.healthy() or (UNWELL if self._is_unwell else None)

    async def shut_down(self) -> None:
        if not hasattr(self, "_reporting"):
            return  # the constructor failed
        self._reporting.cancel()
        if not await asyncio.to_thread(self._engine.drain, ENGINE_DRAIN_S):
            logger.warning("shutting down with windows unfinished, or still leased")
        for part in (self._engine, self._kv, self._tracer):
            await asyncio.to_thread(part.close)


class EncoderWorker(PoolWorker):
    ROLE = "encoder"
    METRICS = ENCODER_METRICS

    _engine: EncoderEngine
    _kv: KVExporter

    def __init__(self, settings: Settings, build: str, portion: float = 1.0) -> None:
        budget = self._start(settings, build)
        from cluster.common.kv.connect import make_exporter
        from encoder_worker.engine import EncoderEngine
        from encoder_worker.sizing import sized

        checkpoint, device = self._checkpoint, self._device
        settings = sized(settings, checkpoint, device, budget, portion)
        self._kv = make_exporter(checkpoint, settings, device, self._name)
        self._engine = EncoderEngine(checkpoint, self._kv, settings.encoder, self._recorder)
        self._busy, self._bulk_busy = BusyShare(), BusyShare()
        self._ready(settings)

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        with request_scope(request.request_id), self._span(request) as span:
            arrived_s = time.monotonic()
            reply = await self._reply(request)
            timings, audio_s = reply.timings, request.n_samples / SAMPLE_RATE
            logger.info(
                f"window {request.window} {'found encoded' if reply.reused else 'encoded'} at "
                f"attempt {request.tries}: {audio_s:.1f} s of audio, batch of "
                f"{timings.batch_size}, {1000 * timings.queue_s:.0f} ms in queue, "
                f"{1000 * timings.encode_s:.0f} ms",
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
            return replace(reply, node=self._node, load=self._engine.load())

    async def _reply(self, request: EncodeRequest) -> EncodeReply:
        future = self._engine.submit(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The reply may have come at the same moment; its pages will not be read.
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


class DecoderWorker(PoolWorker):
    ROLE = "decoder"
    METRICS = DECODER_METRICS

    _engine: DecoderEngine
    _kv: KVImporter

    def __init__(self, settings: Settings, build: str) -> None:
        # By default the thread that launches decode steps waits up to 5 ms for the GIL, if another
        # thread of this process holds it.
        sys.setswitchinterval(SWITCH_S)
        budget = self._start(settings, build)
        from cluster.common.kv.connect import make_importer, make_kv_pool
        from decoder_worker.build import sized
        from decoder_worker.engine import DecoderEngine

        checkpoint, device = self._checkpoint, self._device
        settings = sized(settings, checkpoint, device, budget)
        self._kv = make_importer(checkpoint, settings, device, self._name)
        kv_pool = make_kv_pool(checkpoint, settings, device)
        self._engine = DecoderEngine(checkpoint, self._kv, settings.decoder, kv_pool=kv_pool)
        self._ready(settings)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        with request_scope(request.request_id), self._span(request) as span:
            arrived_s = time.monotonic()
            result = await asyncio.wrap_future(self._engine.submit(request))
            return self._told(request, result, span, arrived_s)

    def record_autoscaling_stats(self) -> dict[str, float]:
        return asdict(self._engine.stats().signals())

    def _told(
        self, request: DecodeRequest, result: DecodeResult, span: Span, arrived_s: float
    ) -> DecodeResult:
        """Report the result to metrics, log and trace, and add the worker's load to it."""
        timings, record, tokens = result.timings, self._recorder, len(result.tokens)
        # Between the arrival of its KV and its prompt the sequence waited for rows in the batch.
        began_s = time.monotonic() - timings.decode_s
        of_kv: dict[str, Any] = {
            "peer": request.handle.agent,
            "transport": timings.transport,
            "bytes": timings.transfer_bytes,
            "payload": request.handle.payload,
        }
        span.stage("decoder queue", arrived_s, timings.queue_s)
        span.stage("KV transfer", arrived_s + timings.queue_s, timings.transfer_s, **of_kv)
        span.stage("prefill", began_s - timings.prefill_s, timings.prefill_s)
        span.stage("decode", began_s, timings.decode_s, steps=timings.steps, tokens=tokens)
        transport, n_bytes = timings.transport, timings.transfer_bytes
        record.add("splitscribe_tokens_total", tokens)
        record.add("splitscribe_kv_transfer_bytes_total", n_bytes, transport=transport)
        record.observe("splitscribe_kv_transfer_seconds", timings.transfer_s, transport=transport)
        record.observe("splitscribe_decode_queue_seconds", timings.waited_s)
        record.observe("splitscribe_prefill_seconds", timings.prefill_s)
        record.observe("splitscribe_decode_seconds", timings.decode_s)
        if timings.steps:
            record.observe("splitscribe_decode_step_seconds", timings.decode_s / timings.steps)
        logger.info(
            f"window {result.window} decoded at attempt {request.tries}: {tokens} tokens in "
            f"{timings.steps} steps, ended by {result.finish_reason}, at temperature "
            f"{result.temperature:g} after {result.attempt} others, KV from "
            f"{request.handle.agent} in {1000 * timings.transfer_s:.1f} ms, "
            f"{1000 * timings.waited_s:.0f} ms in queue, "
            f"{1000 * (timings.prefill_s + timings.decode_s):.0f} ms",
            extra=log_fields(
                window=result.window,
                attempt=request.tries,
                peer=request.handle.agent,
                tokens=tokens,
                finish_reason=result.finish_reason,
                temperature=result.temperature,
                fallbacks=result.attempt,
                **asdict(timings),
            ),
        )
        return replace(result, load=self._engine.load())

    def _report(self) -> None:
        stats, recorder = self._engine.stats(), self._recorder
        recorder.set("splitscribe_decoder_waiting", stats.waiting)
        recorder.set("splitscribe_decoder_loading", stats.loading)
        recorder.set("splitscribe_decoder_running", stats.running)
        recorder.set("splitscribe_kv_pages", stats.pages_total)
        recorder.set("splitscribe_kv_pages_free", stats.pages_free)
        recorder.set("splitscribe_kv_pages_quarantined", stats.pages_quarantined)
        recorder.total("splitscribe_decode_steps_total", stats.steps)
        recorder.total("splitscribe_decoder_busy_seconds_total", stats.prefill_s + stats.step_s)
        recorder.total("splitscribe_decode_fallbacks_total", stats.fallbacks)
        recorder.total("splitscribe_failed_sequences_total", stats.failed)
        for reason, total in self._kv.refused().items():
            recorder.total("splitscribe_refused_handles_total", total, reason=reason)

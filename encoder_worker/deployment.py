"""The encoder's Serve replica: a thin shell around `EncoderEngine`.

It hands windows in and handles out, reports status and metrics, and on shutdown waits until
its exported pages are free. It knows Serve; the engine does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from cluster.errors import WorkerError
from cluster.kv.gpu_memory import gpu_budget
from cluster.kv.handoff import make_exporters
from cluster.logs import request_scope
from cluster.messages import SAMPLE_RATE, EncodeReply, EncodeRequest, WorkerStatus
from cluster.metrics import ENCODER_METRICS
from cluster.model.checkpoint import open_checkpoint
from cluster.model.device import resolve_device
from cluster.replica import gpu_share, report_gauges, start_replica
from cluster.settings import Settings
from encoder_worker.engine import EncoderEngine
from encoder_worker.memory import sized

logger = logging.getLogger(__name__)

DRAIN_S = 30.0  # leases live 10 s from their last renewal, so this is enough for all of them


class EncoderWorker:
    """Serve deployment class of the encoder pool."""

    def __init__(self, settings: Settings, build: str, portion: float = 1.0) -> None:
        """portion: see `encoder_worker.memory.sized`."""
        self._name, recorder = start_replica("encoder", settings, build, ENCODER_METRICS)
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
            checkpoint, self._exporters[0], role, recorder, *self._exporters[1:]
        )
        self._model = checkpoint.name
        self._reporting = asyncio.get_running_loop().create_task(
            report_gauges(recorder, self._gauges)
        )
        logger.info(
            "ready: %s on %s, KV by %s", self._model, self._device, self._exporters[0].transport
        )

    async def encode(self, request: EncodeRequest) -> EncodeReply:
        """Encode one window; cancelling the call takes it out of the queue."""
        with request_scope(request.request_id):
            reply = await self._reply(request)
            logger.info(
                "window %d encoded: %.1f s of audio, batch of %d, %.0f ms in queue, %.0f ms",
                request.window,
                request.n_samples / SAMPLE_RATE,
                reply.timings.batch_size,
                1000 * reply.timings.queue_s,
                1000 * reply.timings.encode_s,
            )
            return reply

    async def _reply(self, request: EncodeRequest) -> EncodeReply:
        future = self._engine.submit(request)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The reply may have come in the same moment: nobody will read those pages.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._engine.revoke(future.result().handle)
            raise

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

    async def __del__(self) -> None:
        """Serve's hook on shutdown."""
        await self.shut_down()

    def _gauges(self) -> Mapping[str, float]:
        stats = self._engine.stats()
        return {
            "splitscribe_encoder_queue_windows": stats.queued,
            "splitscribe_encoder_queue_audio_seconds": stats.queued_audio_s,
            "splitscribe_export_pages_free": stats.pages_free,
            "splitscribe_export_leases": stats.leases,
        }

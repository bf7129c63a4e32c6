"""The decoder's Serve replica: hands windows into `DecoderEngine`, and tokens out.

What computes is imported by the replica itself: whoever starts a cluster only names the class.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from cluster.common.logs import log_fields, request_scope
from cluster.common.messages import DecodeRequest, DecodeResult, SampledToken
from cluster.common.metrics import DECODER_METRICS
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.settings import Settings
from cluster.common.tracing import Span
from cluster.serve.replicas.pool_worker import PoolWorker
from cluster.serve.replicas.replica_setup import gpu_share

if TYPE_CHECKING:
    from cluster.common.kv.importer import KVImporter
    from decoder_worker.engine import DecoderEngine

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005  # a step is launched in less
STREAM_S = 0.1  # at least between two messages of one stream


class DecoderWorker(PoolWorker):
    ROLE = "decoder"
    METRICS = DECODER_METRICS

    _engine: DecoderEngine
    _kv: KVImporter

    def __init__(self, settings: Settings, build: str) -> None:
        # The thread that launches decode steps otherwise waits up to 5 ms for Python, which the
        # event loop, the thread that aligns words, or an encoder of this process has.
        sys.setswitchinterval(SWITCH_S)
        self._start(settings, build)
        from cluster.common.kv.connect import make_importer, make_kv_pool
        from cluster.common.kv.pool import gpu_budget
        from cluster.common.model.device import resolve_device
        from decoder_worker.build import sized
        from decoder_worker.engine import DecoderEngine

        checkpoint = open_checkpoint(settings.model)
        device = resolve_device(settings.decoder.device)
        budget = gpu_budget(device, gpu_share())
        settings = sized(settings, checkpoint, device, budget)
        role = settings.decoder
        self._kv = make_importer(checkpoint, settings, device, self._name)
        self._engine = DecoderEngine(
            checkpoint,
            self._kv,
            role,
            kv_pool=make_kv_pool(checkpoint, settings, device),
            waits=True,
        )
        self._ready(settings, checkpoint.name, device)

    async def decode(self, request: DecodeRequest) -> DecodeResult:
        """Cancelling the call frees what it holds."""
        with request_scope(request.request_id), self._span(request) as span:
            arrived_s = time.monotonic()
            result = await asyncio.wrap_future(self._engine.submit(request))
            return self._told(request, result, span, arrived_s)

    async def decode_stream(
        self, request: DecodeRequest
    ) -> AsyncGenerator[tuple[SampledToken, ...] | DecodeResult, None]:
        """As `decode`, with the tokens in groups (`grouped`) before the result."""
        loop = asyncio.get_running_loop()
        sampled: asyncio.Queue[SampledToken | None] = asyncio.Queue()  # None is the last

        def tell(token: SampledToken | None) -> None:  # on the engine's thread
            loop.call_soon_threadsafe(sampled.put_nowait, token)

        with request_scope(request.request_id), self._span(request) as span:
            arrived_s = time.monotonic()
            submitted = self._engine.submit(request, tell)
            submitted.add_done_callback(lambda _: tell(None))
            try:
                # The future may be done before its last tokens have reached this queue.
                async for tokens in grouped(sampled):
                    yield tokens
                result = await asyncio.wrap_future(submitted)
                yield self._told(request, result, span, arrived_s)
            finally:
                submitted.cancel()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return asdict(self._engine.stats().signals())

    async def record_replica_metadata(self) -> dict[str, str]:
        return {"domain": self._location.domain}

    def _told(
        self, request: DecodeRequest, result: DecodeResult, span: Span, arrived_s: float
    ) -> DecodeResult:
        """The answer, once metrics, log and trace have it."""
        tell_stages(span, request, result, arrived_s)
        timings, record = result.timings, self._recorder
        transport = timings.transport
        record.add("splitscribe_tokens_total", len(result.tokens))
        record.add(
            "splitscribe_kv_transfer_bytes_total", timings.transfer_bytes, transport=transport
        )
        record.observe("splitscribe_kv_transfer_seconds", timings.transfer_s, transport=transport)
        record.observe("splitscribe_decode_queue_seconds", timings.waited_s)
        record.observe("splitscribe_prefill_seconds", timings.prefill_s)
        record.observe("splitscribe_decode_seconds", timings.decode_s)
        if timings.steps:
            record.observe("splitscribe_decode_step_seconds", timings.decode_s / timings.steps)
        logger.info(
            "window %d decoded at attempt %d: %d tokens in %d steps, ended by %s, at temperature "
            "%g after %d others, KV from %s in %.1f ms, %.0f ms in queue, %.0f ms",
            result.window,
            request.tries,
            len(result.tokens),
            timings.steps,
            result.finish_reason,
            result.temperature,
            result.attempt,
            request.handle.agent,
            1000 * timings.transfer_s,
            1000 * timings.waited_s,
            1000 * (timings.prefill_s + timings.decode_s),
            extra=log_fields(
                window=result.window,
                attempt=request.tries,
                peer=request.handle.agent,
                tokens=len(result.tokens),
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


class DecoderReplica(DecoderWorker):
    async def __del__(self) -> None:
        await self.shut_down()


async def grouped(
    sampled: asyncio.Queue[SampledToken | None],
) -> AsyncGenerator[tuple[SampledToken, ...], None]:
    """The tokens up to None: the first at once, later ones together with those of `STREAM_S`."""
    clock = asyncio.get_running_loop().time
    next_s, is_open = clock(), True
    while is_open:
        group = [await sampled.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout_at(next_s):
                while group[-1] is not None:
                    group.append(await sampled.get())
        is_open = group[-1] is not None
        if tokens := tuple(token for token in group if token is not None):
            yield tokens
            next_s = clock() + STREAM_S


def tell_stages(span: Span, request: DecodeRequest, result: DecodeResult, arrived_s: float) -> None:
    """Between the arrival of the KV and the prompt, it waited for rows in the batch."""
    timings, now_s = result.timings, time.monotonic()
    span.stage("decoder queue", arrived_s, timings.queue_s)
    span.stage(
        "KV transfer",
        arrived_s + timings.queue_s,
        timings.transfer_s,
        peer=request.handle.agent,
        transport=timings.transport,
        bytes=timings.transfer_bytes,
        payload=request.handle.payload,
    )
    decode_began_s = now_s - timings.decode_s
    span.stage("prefill", decode_began_s - timings.prefill_s, timings.prefill_s)
    tokens = len(result.tokens)
    span.stage("decode", decode_began_s, timings.decode_s, steps=timings.steps, tokens=tokens)

"""The one place that knows how a window is encoded, handed over, decoded, and tried again.

What fails is tried again here and nowhere else: lost KV is encoded again, a dead or draining
worker is replaced by another, and a full pool is asked again, all until the request's deadline.
This module does not know where windows come from or what becomes of their tokens.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field

from cluster.errors import (
    DeadlineExceededError,
    KVLostError,
    LayoutMismatchError,
    OverloadedError,
    SequenceFailedError,
    SplitscribeError,
    WorkerDrainingError,
    WorkerError,
    WorkerGoneError,
)
from cluster.logs import told
from cluster.messages import (
    FRAMES_PER_S,
    SAMPLE_RATE,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    EncodeTimings,
    FileMel,
    OnToken,
    Pcm,
    SampledToken,
)
from cluster.metrics import Recorder
from cluster.settings import RouterSettings
from cluster.tracing import NO_TRACER, Span, Tracer
from router.clients import DecoderClient, EncoderClient
from router.interface import RequestContext, StageTimings

logger = logging.getLogger(__name__)

NO_PEER = "nobody"
FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0


@dataclass(frozen=True, slots=True)
class WindowAudio:
    """What an encoder gets of one window.

    index: its number within the request, which orders it in queues and seeds its sampling.
    pcm: int16 [n], as in `cluster.messages.EncodeRequest`.
    content_frames: mel frames of audio, the rest of the window is padding.
    """

    index: int
    pcm: Pcm
    content_frames: int
    file_mel: FileMel | None = None

    @classmethod
    def of_samples(cls, index: int, pcm: Pcm) -> WindowAudio:
        """A window that stands for itself, with its own log-mel maximum."""
        frames = max(1, round(pcm.shape[0] * FRAMES_PER_S / SAMPLE_RATE))
        return cls(index, pcm, frames)


@dataclass(slots=True)
class RequestRun:
    """One request's identity and time, and where its time went so far."""

    context: RequestContext
    results: list[DecodeResult] = field(default_factory=list)
    encodes: int = 0
    encode_s: float = 0.0
    encode_queue_s: float = 0.0

    def remaining_s(self) -> float:
        remaining_s = self.context.remaining_s()
        if remaining_s <= 0:
            raise DeadlineExceededError(f"the request's {self.context.deadline_s:.0f} s ran out")
        return remaining_s

    def add_encode(self, timings: EncodeTimings) -> None:
        self.encode_s += timings.encode_s
        self.encode_queue_s += timings.queue_s

    def timings(self, audio_s: float) -> StageTimings:
        done = [result.timings for result in self.results]
        return StageTimings(
            audio_s=audio_s,
            queue_s=self.encode_queue_s + sum(t.queue_s for t in done),
            encode_s=self.encode_s,
            transfer_s=sum(t.transfer_s for t in done),
            decode_s=sum(t.prefill_s + t.decode_s for t in done),
            transfer_bytes=sum(t.transfer_bytes for t in done),
            steps=sum(t.steps for t in done),
            windows=len(done),
            attempts=self.encodes,
        )


class Pipeline:
    """Takes windows through both pools, for all requests for one model."""

    def __init__(
        self,
        encoders: EncoderClient,
        decoders: DecoderClient,
        settings: RouterSettings,
        recorder: Recorder,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self._encoders = encoders
        self._decoders = decoders
        self._settings = settings
        self._recorder = recorder
        self._tracer = tracer

    async def decode(
        self,
        run: RequestRun,
        audio: WindowAudio,
        options: DecodeOptions,
        on_token: OnToken | None = None,
    ) -> DecodeResult:
        """Encode and decode one window.

        on_token is told of each token once: another worker, which samples the same ones again,
        goes on behind what was told.

        Raises:
            DeadlineExceededError: the request's time is over.
            OverloadedError: no worker could finish it in `max_attempts` tries.
            SplitscribeError: what no other worker would do better.
        """
        with self._tracer.span("window", run.context.span.traceparent, window=audio.index) as span:
            return await self._decode_traced(run, audio, options, on_token, span)

    async def _decode_traced(
        self,
        run: RequestRun,
        audio: WindowAudio,
        options: DecodeOptions,
        on_token: OnToken | None,
        span: Span,
    ) -> DecodeResult:
        encoded: EncodeReply | None = None
        told = ToldTokens(on_token) if on_token is not None else None
        backoff_s = FIRST_BACKOFF_S
        failures = 0
        while True:
            try:
                async with asyncio.timeout(run.remaining_s()):
                    if encoded is None:
                        encoded = await self._encode(run, audio, span)
                    result = await self._decode(run, audio, options, encoded, told, span)
                    self._recorder.add("splitscribe_windows_total")
                    return result
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"the request's {run.context.deadline_s:.0f} s ran out "
                    f"while window {audio.index} was in the cluster"
                ) from error
            except OverloadedError:
                self._note_retry(run, audio, encoded, "full")
                span.event("retry", reason="full")
            except (
                KVLostError,
                LayoutMismatchError,
                SequenceFailedError,
                WorkerGoneError,
                WorkerDrainingError,
            ) as error:
                failures += 1
                self._note_retry(run, audio, encoded, type(error).__name__, str(error))
                span.event("retry", reason=type(error).__name__)
                if not isinstance(error, WorkerGoneError | WorkerDrainingError):
                    encoded = None  # encode again
                if failures >= self._settings.max_attempts:
                    raise _given_up(error, failures) from error
            await asyncio.sleep(min(backoff_s, run.remaining_s()) * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _encode(self, run: RequestRun, audio: WindowAudio, span: Span) -> EncodeReply:
        run.encodes += 1
        called_s = time.monotonic()
        with self._tracer.span(
            "call encoder", span.traceparent, "client", attempt=run.encodes
        ) as call:
            reply = await self._encoders.encode(
                EncodeRequest(
                    request_id=run.context.request_id,
                    window=audio.index,
                    attempt=run.encodes,
                    pcm=audio.pcm,
                    remaining_s=run.remaining_s(),
                    file_mel=audio.file_mel,
                    traceparent=call.traceparent,
                )
            )
        run.add_encode(reply.timings)
        self._record_hop("encoder", called_s, reply.timings.queue_s + reply.timings.encode_s)
        return reply

    async def _decode(
        self,
        run: RequestRun,
        audio: WindowAudio,
        options: DecodeOptions,
        encoded: EncodeReply,
        told: ToldTokens | None,
        span: Span,
    ) -> DecodeResult:
        called_s, handle = time.monotonic(), encoded.handle
        with self._tracer.span(
            "call decoder", span.traceparent, "client", attempt=handle.attempt
        ) as call:
            request = DecodeRequest(
                request_id=run.context.request_id,
                window=audio.index,
                attempt=handle.attempt,
                handle=handle,
                options=options,
                remaining_s=run.remaining_s(),
                content_frames=audio.content_frames,
                traceparent=call.traceparent,
                kv_place=encoded.place,
            )
            if told is None:
                result = await self._decoders.decode(request)
            else:
                result = await self._decoders.decode(request, told.begin())
        run.results.append(result)
        spent = result.timings
        self._record_hop(
            "decoder", called_s, spent.queue_s + spent.transfer_s + spent.prefill_s + spent.decode_s
        )
        return result

    def _record_hop(self, role: str, called_s: float, worked_s: float) -> None:
        hop_s = time.monotonic() - called_s - worked_s
        self._recorder.observe("splitscribe_hop_seconds", max(0.0, hop_s), role=role)

    def _note_retry(
        self,
        run: RequestRun,
        audio: WindowAudio,
        encoded: EncodeReply | None,
        reason: str,
        what: str = "",
    ) -> None:
        """encoded: the encoder's answer, if it had come that far."""
        self._recorder.add("splitscribe_window_retries_total", reason=reason)
        peer = encoded.handle.agent if encoded is not None else NO_PEER
        logger.log(
            logging.DEBUG if reason == "full" else logging.WARNING,
            "window %d is tried again after attempt %d, encoded by %s: %s %s",
            audio.index,
            run.encodes,
            peer,
            reason,
            what,
            extra=told(window=audio.index, attempt=run.encodes, peer=peer, reason=reason),
        )


class ToldTokens:
    """Hands tokens on, each once, over several deliveries of the same window."""

    def __init__(self, on_token: OnToken) -> None:
        self._on_token = on_token
        self._n_told = 0

    def begin(self) -> OnToken:
        """For one delivery, which begins with the first token again."""
        n_seen = 0

        def take(token: SampledToken) -> None:
            nonlocal n_seen
            n_seen += 1
            if n_seen > self._n_told:
                self._n_told = n_seen
                self._on_token(token)

        return take


def _given_up(error: WorkerError, failures: int) -> SplitscribeError:
    """What the client is told after the last attempt."""
    if isinstance(error, SequenceFailedError):
        return error
    return OverloadedError(
        f"no worker could finish a window in {failures} tries: {error}", retry_after_s=2.0
    )

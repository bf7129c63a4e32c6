"""Encodes, hands over, decodes and retries windows. No other module knows these steps.

Lost KV is encoded again, and another worker replaces one that died or failed, up to `max_attempts`
times per window. Full and draining workers are asked until the request's deadline. A window with a
trimmed encoder context whose text the decoder doubts is encoded again in full.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.common.clock import SYSTEM_CLOCK, Clock
from cluster.common.errors import (
    DeadlineExceededError,
    KVLostError,
    LayoutMismatchError,
    OverloadedError,
    SequenceFailedError,
    WorkerDiedError,
    WorkerDrainingError,
    WorkerError,
    WorkerGoneError,
)
from cluster.common.fair_order import place_of
from cluster.common.logs import log_fields
from cluster.common.messages import (
    FRAMES_PER_S,
    HOP_LENGTH,
    SAMPLE_RATE,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    EncodeReply,
    EncodeRequest,
    FileMel,
    Pcm,
    Role,
    kept_key,
    work_of,
)
from cluster.common.metrics import Recorder
from cluster.common.model.encoder_context import FULL
from cluster.common.settings import RouterSettings
from cluster.common.tracing import NO_TRACER, Span, Tracer
from router.audio_key import audio_key
from router.deadly_audio import DeadlyAudio
from router.interface import RequestContext, StageTimings
from router.pools import DecoderClient, EncoderClient
from router.window_queue import Turn, WindowQueue

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0  # between two tries
PAUSE_SHARE = 1 / 60  # of the time left, after failures: bulk work waits for replacements
KEPT_S = 5.0  # after a longer pause a window is encoded again; KV is leased for longer
PATIENCE_S = 120.0  # least time limit of a call,
BULK_PATIENCE_S = 3600.0  # and for bulk work, which may stand still while others work
PATIENCE = 4.0  # time limit of a call, as a multiple of the longest recent one
FIRST_CALL_S = 112.5  # assumed before the first answer: ends a lost call before a request stalls
OF_LATE = 0.99  # decay of the longest call with each answer
# Errors after which another worker may succeed.
RETRIED = (KVLostError, LayoutMismatchError, SequenceFailedError)
WAITED_FOR = (OverloadedError, WorkerDrainingError)  # these tries do not count


@dataclass(frozen=True, slots=True)
class WindowAudio:
    index: int  # within the request: orders it in queues and seeds its sampling
    pcm: Pcm  # int16 [n], as in `EncodeRequest`
    content_frames: int  # mel frames of audio; the rest of the window is padding
    file_mel: FileMel | None = None
    context: int = FULL  # encoder positions of the first encode

    @classmethod
    def of_samples(
        cls, index: int, pcm: Pcm, context_for: Callable[[int], int] | None = None
    ) -> WindowAudio:
        """A window that is not a slice of a file. `context_for` maps its mel frames, rounded up, to
        the encoder context; None: full.
        """
        frames = max(1, round(pcm.shape[0] * FRAMES_PER_S / SAMPLE_RATE))
        begun = -(-pcm.shape[0] // HOP_LENGTH)
        return cls(index, pcm, frames, context=context_for(begun) if context_for else FULL)


@dataclass(slots=True)
class RequestRun:
    """A running request. Its `key` is unique, unlike the id, which clients choose."""

    context: RequestContext
    timings: StageTimings = field(default_factory=StageTimings)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def remaining_s(self) -> float:
        remaining_s = self.context.remaining_s()
        if remaining_s <= 0:
            raise self.context.too_late()
        return remaining_s


@dataclass(slots=True)
class WindowRun:
    request: RequestRun
    audio: WindowAudio
    options: DecodeOptions
    span: Span
    context: int  # encoder positions: all of them after a doubt
    turn: Turn
    attempt: int = 0  # number of its last encode among the request's
    encoded: EncodeReply | None = None  # while its KV may still be there
    failures: int = 0
    limit: asyncio.Timeout = field(init=False)  # deadline of the current try
    is_late: bool = False  # a call without an answer was given up
    audio_key: bytes = b""  # set with the first encode
    is_lost: bool = False  # its KV could not be decoded, so it is encoded again even if it is kept

    @property
    def tries(self) -> int:
        return self.failures + 1


class Pipeline:
    """Encodes and decodes the windows of all requests for one model."""

    def __init__(
        self,
        encoders: EncoderClient,
        decoders: DecoderClient,
        settings: RouterSettings,
        recorder: Recorder,
        tracer: Tracer = NO_TRACER,
        clock: Clock = SYSTEM_CLOCK,
        *,
        reuses_kv: bool = True,
    ) -> None:
        """reuses_kv: tell encoders which windows have the same audio, to encode it once."""
        self._reuses_kv = reuses_kv
        self._queue = WindowQueue(encoders, decoders, clock)
        self._encoders = encoders
        self._decoders = decoders
        self._in_flight = settings.max_windows_in_flight
        self._max_attempts = settings.max_attempts
        self._deadly = DeadlyAudio(clock)
        self._recorder = recorder
        self._tracer = tracer
        self._clock = clock
        self._longest_s: dict[Role, float] = {}  # longest recent call that was answered

    async def decode(
        self, run: RequestRun, audio: WindowAudio, options: DecodeOptions
    ) -> DecodeResult:
        """Encode and decode one window. Raises DeadlineExceededError, OverloadedError after
        `max_attempts`, WindowRefusedError if workers died of it, and errors not worth a retry.
        """
        with self._tracer.span("window", run.context.span.traceparent, window=audio.index) as span:
            context = run.context
            priority, rank = place_of(audio.index, context.priority, context.audio_s)
            work, rows = work_of(audio.context), float(options.n_rows)
            turn = Turn(priority, context.client, rank, work, rows)
            window = WindowRun(run, audio, options, span, audio.context, turn)
            if window.context != FULL:
                self._recorder.add("splitscribe_trimmed_windows_total")
            if self._deadly:
                self._deadly.check(_owned_key(window))
            try:
                return await self._try_until_done(window)
            finally:
                self._deadly.forget(id(window))

    async def _try_until_done(self, window: WindowRun) -> DecodeResult:
        request, full_s = window.request, FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(request.remaining_s()) as window.limit:
                    if not self._deadly.goes_alone(id(window)):
                        return await self._try(window)
                    async with self._deadly.one_by_one:
                        return await self._try(window)
            except (*WAITED_FOR, TimeoutError, DeadlineExceededError) as error:
                request.remaining_s()  # raises, unless windows have ended meanwhile
                reason = "full" if isinstance(error, OverloadedError) else "draining"
                if not isinstance(error, WAITED_FOR):
                    window.encoded, reason = None, "late"
                    window.is_late = window.is_late or not window.limit.expired()
                self._note_retry(window, reason)
                pause_s, full_s = full_s, min(2 * full_s, LAST_PAUSE_S)
            except (*RETRIED, WorkerGoneError) as error:
                self._note_failure(window, error)
                longest_s = max(LAST_PAUSE_S, PAUSE_SHARE * request.remaining_s())
                pause_s = min(FIRST_PAUSE_S * 4 ** (window.failures - 1), longest_s, 60.0)
                if pause_s > KEPT_S:
                    window.encoded = None
            pause_s = min(pause_s, request.remaining_s())
            await self._clock.sleep(pause_s * self._clock.random.uniform(0.5, 1.0))

    def _note_failure(self, window: WindowRun, error: WorkerError) -> None:
        """Raises the request's error after the last try."""
        self._note_retry(window, type(error).__name__, str(error))
        window.failures += 1
        window.request.timings.failures += 1
        if isinstance(error, RETRIED):
            window.encoded = None  # encode again
            window.is_lost = True
        if isinstance(error, WorkerDiedError):
            self._deadly.note_death(id(window), _owned_key(window), error)
        if window.failures >= self._max_attempts:
            if isinstance(error, SequenceFailedError):
                raise error
            given_up = f"no worker could finish a window in {window.failures} tries: {error}"
            raise OverloadedError(given_up, retry_after_s=2.0) from error

    async def _try(self, window: WindowRun) -> DecodeResult:
        with self._queue.holding(window.turn):
            if window.encoded is None:
                window.encoded = await self._encode(window)
            else:
                self._queue.skip(window.turn)
            result = await self._decode(window, window.encoded)
            if result.doubted:
                self._note_doubt(window)
                window.context, window.encoded = FULL, None
                window.encoded = await self._encode(window)
                result = await self._decode(window, window.encoded)
        self._recorder.add("splitscribe_windows_total")
        return result

    async def _encode(self, window: WindowRun) -> EncodeReply:
        request, audio, turn = window.request, window.audio, window.turn
        is_first = window.attempt == 0
        timings = request.timings
        timings.attempts += 1
        window.attempt = timings.attempts
        if self._reuses_kv and not window.audio_key:
            window.audio_key = _owned_key(window)
        turn.work = work_of(window.context)
        turn.kv_key = b"" if window.is_lost else kept_key(window.audio_key, window.context)
        timings.waited(audio.index, await self._queue.wait(turn, request.remaining_s()))
        # The request's time has grown if windows ended during the wait.
        window.limit.reschedule(asyncio.get_running_loop().time() + request.remaining_s())
        called_s = self._clock.monotonic()
        try:
            with self._call("encoder", window) as call:
                sent = EncodeRequest(
                    request_id=request.context.request_id,
                    window=audio.index,
                    attempt=window.attempt,
                    pcm=audio.pcm,
                    remaining_s=request.remaining_s(),
                    file_mel=audio.file_mel,
                    traceparent=call.traceparent,
                    audio_key=window.audio_key,
                    fresh=window.is_lost,
                    context=window.context,
                    priority=turn.priority,
                    key=request.key,
                    owner=turn.owner,
                    rank=turn.rank,
                    sender=self._queue.sender,
                    backlog=self._queue.backlog("encoder", turn.priority),
                    tries=window.tries,
                )
                async with self._answered_in_time("encoder", window):
                    reply = await self._encoders.encode(sent)
        finally:
            self._queue.encoded(turn)
        spent = reply.timings
        timings.encode_s += spent.encode_s
        timings.waited(audio.index, spent.queue_s)
        if is_first and reply.reused is not None:  # later encodes say nothing of reuse
            timings.cache_hits += reply.reused
            timings.cache_misses += not reply.reused
        self._record_hop("encoder", called_s, spent.queue_s + spent.encode_s)
        return reply

    async def _decode(self, window: WindowRun, encoded: EncodeReply) -> DecodeResult:
        handle = encoded.handle
        called_s = self._clock.monotonic()
        with self._call("decoder", window) as call:
            request = DecodeRequest(
                request_id=window.request.context.request_id,
                window=window.audio.index,
                attempt=handle.attempt,
                handle=handle,
                options=window.options,
                remaining_s=window.request.remaining_s(),
                content_frames=window.audio.content_frames,
                traceparent=call.traceparent,
                kv_node=encoded.node,
                priority=window.turn.priority,
                key=window.request.key,
                owner=window.turn.owner,
                rank=window.turn.rank,
                sender=self._queue.sender,
                backlog=self._queue.backlog("decoder", window.turn.priority),
                tries=window.tries,
            )
            async with self._answered_in_time("decoder", window):
                result = await self._decoders.decode(request)
        spent, timings = result.timings, window.request.timings
        timings.waited(window.audio.index, spent.waited_s)
        timings.transfer_s += spent.transfer_s
        timings.decode_s += spent.prefill_s + spent.decode_s
        timings.transfer_bytes += spent.transfer_bytes
        timings.steps += spent.steps
        timings.windows += not result.doubted
        worked_s = spent.waited_s + spent.transfer_s + spent.prefill_s + spent.decode_s
        self._record_hop("decoder", called_s, worked_s)
        if not result.doubted:
            work_s = encoded.timings.encode_s + worked_s - spent.waited_s
            window.request.context.window_ended(work_s / self._in_flight)
        return result

    def _call(self, role: Role, window: WindowRun) -> Span:
        parent = window.span.traceparent
        return self._tracer.span(f"call {role}", parent, "client", attempt=window.tries)

    def _answered_in_time(self, role: Role, window: WindowRun) -> asyncio.Timeout:
        """Limit a worker's call, since it may get lost without notice while the worker lives."""
        if window.is_late:
            return asyncio.timeout(None)
        least_s = BULK_PATIENCE_S if window.turn.priority == "bulk" else PATIENCE_S
        longest_s = self._longest_s.get(role, FIRST_CALL_S)
        return asyncio.timeout(max(least_s, PATIENCE * longest_s))

    def _record_hop(self, role: Role, called_s: float, worked_s: float) -> None:
        called_for_s = self._clock.monotonic() - called_s
        self._longest_s[role] = max(called_for_s, OF_LATE * self._longest_s.get(role, 0.0))
        hop_s = max(0.0, called_for_s - worked_s)
        self._recorder.observe("splitscribe_hop_seconds", hop_s, role=role)

    def _note_doubt(self, window: WindowRun) -> None:
        self._recorder.add("splitscribe_doubted_windows_total")
        window.span.event("doubt", context=window.context)
        logger.info(
            "window %d is encoded once more in full: %d positions were not enough",
            window.audio.index,
            window.context,
            extra=log_fields(window=window.audio.index, attempt=window.tries),
        )

    def _note_retry(self, window: WindowRun, reason: str, message: str = "") -> None:
        self._recorder.add("splitscribe_window_retries_total", reason=reason)
        window.span.event("retry", reason=reason)
        index, attempt = window.audio.index, window.tries
        peer = window.encoded.handle.agent if window.encoded is not None else "nobody"
        logger.log(
            logging.DEBUG if reason == "full" else logging.WARNING,
            "window %d is tried again after attempt %d, encoded by %s: %s %s",
            *(index, attempt, peer, reason, message),
            extra=log_fields(window=index, attempt=attempt, peer=peer, reason=reason),
        )


def _owned_key(window: WindowRun) -> bytes:
    audio = window.audio
    return audio_key(audio.pcm, audio.file_mel, window.request.context.owner)

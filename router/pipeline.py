"""The one place that knows the whole path: upload -> windows -> encoder -> decoder -> transcript.

Windows of a request run side by side, a bounded number at a time, each through its own chain of
one encode and one decode, so that none holds pages while another waits. While the language is
unknown windows go one after another, until the first with speech has told it.

What fails is tried again here and nowhere else: lost KV is encoded again, a dead or draining
worker is replaced by another, a full pool is asked again, all until the request's deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from cluster.errors import (
    DeadlineExceededError,
    KVLostError,
    OverloadedError,
    SequenceFailedError,
    SplitscribeError,
    WorkerDrainingError,
    WorkerError,
    WorkerGoneError,
)
from cluster.messages import (
    SAMPLE_RATE,
    CrossKVHandle,
    DecodeOptions,
    DecodeRequest,
    DecodeResult,
    EncodeRequest,
    EncodeTimings,
)
from cluster.metrics import ROUTER_METRICS, Recorder, silent_recorder
from cluster.model.tokenizer import WhisperTokenizer
from cluster.settings import RouterSettings
from router.audio import AudioStream
from router.clients import DecoderClient, EncoderClient
from router.gather import WindowTranscript, gather_window, is_silence, merge_windows
from router.schemas import TranscriptionParams
from router.seams import HealthReport, PipelineResult, PoolHealth, RequestContext, StageTimings
from router.windows import Window

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 2.0


class AudioSource(Protocol):
    """Where windows come from: `router.audio.AudioPool`."""

    def open(
        self, upload: Path, *, request_id: str, timeout_s: float
    ) -> AbstractAsyncContextManager[AudioStream]: ...


class TranscriptionPipeline:
    """Implements `router.seams.Pipeline` over an audio pool and two worker pools."""

    def __init__(
        self,
        audio: AudioSource,
        encoders: EncoderClient,
        decoders: DecoderClient,
        tokenizer: WhisperTokenizer,
        settings: RouterSettings,
        recorder: Recorder | None = None,
    ) -> None:
        self._audio = audio
        self._encoders = encoders
        self._decoders = decoders
        self.tokenizer = tokenizer
        self._settings = settings
        self._recorder = recorder or silent_recorder(ROUTER_METRICS)

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, context: RequestContext
    ) -> PipelineResult:
        """See `router.seams.Pipeline.transcribe`."""
        run = _RequestRun(context, self._options(params))
        slots = asyncio.Semaphore(self._settings.max_windows_in_flight)
        try:
            async with self._audio.open(
                upload, request_id=context.request_id, timeout_s=context.remaining_s()
            ) as stream:
                if stream.expected_s is not None:
                    context.expect_audio(stream.expected_s)
                async with asyncio.TaskGroup() as group:
                    async for window in stream:
                        context.found_audio(window.end_s)
                        if run.options.language is None:
                            await self._run_window(run, window)
                            continue
                        await slots.acquire()
                        task = group.create_task(self._run_window(run, window))
                        task.add_done_callback(lambda _: slots.release())
        except BaseExceptionGroup as failures:
            raise _first(failures) from None
        context.found_audio(stream.duration_s)
        self._recorder.add("splitscribe_audio_seconds_total", stream.duration_s)
        self._recorder.observe("splitscribe_audio_decode_seconds", stream.decode_s)
        transcript = merge_windows(
            run.windows,
            duration_s=stream.duration_s,
            task=params.task,
            language=run.options.language,
        )
        return PipelineResult(transcript, run.timings(stream.decode_s))

    async def health(self) -> HealthReport:
        """See `router.seams.Pipeline.health`."""
        encoders, decoders = await asyncio.gather(self._encoders.status(), self._decoders.status())
        pools = {
            "encoder": PoolHealth(any(w.healthy for w in encoders), len(encoders), tuple(encoders)),
            "decoder": PoolHealth(any(w.healthy for w in decoders), len(decoders), tuple(decoders)),
        }
        return HealthReport(all(pool.ready for pool in pools.values()), pools)  # type: ignore[arg-type]

    def _options(self, params: TranscriptionParams) -> DecodeOptions:
        language = params.language
        if language is None and not self.tokenizer.is_multilingual:
            language = "en"
        prompt = (params.prompt or "").strip()
        return DecodeOptions(
            language=language,
            task=params.task,
            timestamps=True,
            prompt_tokens=tuple(self.tokenizer.encode(" " + prompt)) if prompt else (),
            temperature=params.temperature,
            seed=params.seed if params.seed is not None else secrets.randbits(31),
        )

    async def _run_window(self, run: _RequestRun, window: Window) -> None:
        result = await self._decode_window(run, window)
        duration_s = window.pcm.shape[0] / SAMPLE_RATE
        self._recorder.add("splitscribe_windows_total")
        run.context.finished_audio(duration_s)
        if run.options.language is None and not is_silence(result):
            run.settle_language(result.language)
        run.windows.append(
            gather_window(
                result,
                offset_s=window.start_s,
                duration_s=duration_s,
                tokenizer=self.tokenizer,
            )
        )

    async def _decode_window(self, run: _RequestRun, window: Window) -> DecodeResult:
        """Take one window through both pools, again and again until it works or time is up."""
        handle: CrossKVHandle | None = None
        backoff_s = FIRST_BACKOFF_S
        failures = 0
        while True:
            try:
                async with asyncio.timeout(run.remaining_s()):
                    if handle is None:
                        handle = await self._encode(run, window)
                    return await self._decode(run, window, handle)
            except TimeoutError as error:
                raise DeadlineExceededError(
                    f"the request's {run.context.deadline_s:.0f} s ran out "
                    f"while window {window.index} was in the cluster"
                ) from error
            except OverloadedError:
                self._note_retry(run, window, "full")
            except (
                KVLostError,
                SequenceFailedError,
                WorkerGoneError,
                WorkerDrainingError,
            ) as error:
                failures += 1
                if isinstance(error, KVLostError | SequenceFailedError):
                    handle = None  # encode again
                self._note_retry(run, window, type(error).__name__, str(error))
                if failures >= self._settings.max_attempts:
                    raise _given_up(error, failures) from error
            await asyncio.sleep(min(backoff_s, run.remaining_s()) * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, LAST_BACKOFF_S)

    async def _encode(self, run: _RequestRun, window: Window) -> CrossKVHandle:
        run.encodes += 1
        reply = await self._encoders.encode(
            EncodeRequest(
                request_id=run.context.request_id,
                window=window.index,
                attempt=run.encodes,
                pcm=window.pcm,
                remaining_s=run.remaining_s(),
            )
        )
        run.add_encode(reply.timings)
        return reply.handle

    async def _decode(
        self, run: _RequestRun, window: Window, handle: CrossKVHandle
    ) -> DecodeResult:
        result = await self._decoders.decode(
            DecodeRequest(
                request_id=run.context.request_id,
                window=window.index,
                attempt=handle.attempt,
                handle=handle,
                options=run.options,
                remaining_s=run.remaining_s(),
            )
        )
        run.results.append(result)
        return result

    def _note_retry(self, run: _RequestRun, window: Window, reason: str, what: str = "") -> None:
        self._recorder.add("splitscribe_window_retries_total", reason=reason)
        level = logging.DEBUG if reason == "full" else logging.WARNING
        logger.log(level, "window %d is tried again: %s %s", window.index, reason, what)


@dataclass(slots=True)
class _RequestRun:
    """What one request has gathered so far."""

    context: RequestContext
    options: DecodeOptions
    windows: list[WindowTranscript] = field(default_factory=list)
    results: list[DecodeResult] = field(default_factory=list)
    encodes: int = 0
    encode_s: float = 0.0
    encode_queue_s: float = 0.0

    def remaining_s(self) -> float:
        remaining_s = self.context.remaining_s()
        if remaining_s <= 0:
            raise DeadlineExceededError(f"the request's {self.context.deadline_s:.0f} s ran out")
        return remaining_s

    def settle_language(self, language: str) -> None:
        """Decode all later windows in `language`."""
        self.options = replace(self.options, language=language)

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


def _given_up(error: WorkerError, failures: int) -> SplitscribeError:
    """What the client is told after the last attempt."""
    if isinstance(error, SequenceFailedError):
        return error
    return OverloadedError(
        f"no worker could finish a window in {failures} tries: {error}", retry_after_s=2.0
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended a group of any depth; the others are what it cancelled."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first

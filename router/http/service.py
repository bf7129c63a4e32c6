"""One transcription request from its form to its answer.

Counts it against its key, admits it, reads and checks the form, runs the transcriber of the model
that it names while watching for a hang-up, and writes the answer, whole or as a stream. What it
holds is given back in the reverse order, however it ends. Raises errors; `router.http.envelope`
writes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from cluster.logs import current_request_id, told
from cluster.metrics import Recorder
from cluster.settings import RouterSettings
from router.api.formats import render
from router.api.forms import requested_model
from router.api.params import TranscriptionParams
from router.http.admission import BYTES_PER_AUDIO_S, Admission, AdmittedRequest
from router.http.keys import KeyRing
from router.http.middleware import request_span
from router.http.models import ModelRegistry
from router.http.sse import EventStream, EventStreamResponse, StreamContext
from router.http.supervise import supervise
from router.http.uploads import ClientDisconnectedError, check_content_length, receive_form
from router.interface import RequestContext, StageTimings, Transcriber, TranscriptionResult
from router.transcript import TokenLogprob

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # never seen by anyone but the access log

Parse = Callable[[Iterable[tuple[str, str]], Collection[str]], TranscriptionParams]


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that has been read and checked."""

    request: Request
    upload: Path
    params: TranscriptionParams
    transcriber: Transcriber
    share: AdmittedRequest
    started_s: float  # monotonic
    upload_s: float


class TranscriptionService:
    """Answers the audio endpoints; one for all requests of a router."""

    def __init__(
        self,
        registry: ModelRegistry,
        settings: RouterSettings,
        keys: KeyRing,
        *,
        recorder: Recorder,
        spool_dir: Path | None,
        heartbeat_s: float,
    ) -> None:
        self.admission = Admission(settings.max_pending_audio_s)
        self._registry = registry
        self._settings = settings
        self._keys = keys
        self._recorder = recorder
        self._spool_dir = spool_dir
        self._heartbeat_s = heartbeat_s

    def report(self) -> None:
        """Tell the metrics what is pending; called once a second."""
        record = self._recorder.set
        record("splitscribe_pending_requests", self.admission.requests)
        record("splitscribe_pending_audio_seconds", self.admission.pending_audio_s)
        record("splitscribe_max_pending_audio_seconds", self._settings.max_pending_audio_s)

    async def answer(self, request: Request, parse: Parse) -> Response:
        """Do one request; `parse` checks its form for the endpoint that it came to."""
        started_s = time.monotonic()
        try:
            async with AsyncExitStack() as stack:
                job = await self._receive(request, parse, stack, started_s)
                if job.params.stream:
                    return await self._begin_stream(job, stack)
                return await self._whole(job)
        except ClientDisconnectedError:
            logger.info("the client hung up after %.1f s", time.monotonic() - started_s)
            return Response(status_code=CLIENT_CLOSED)
        except asyncio.CancelledError:  # how Serve says so
            logger.info("given up by its caller after %.1f s", time.monotonic() - started_s)
            raise

    async def _receive(
        self, request: Request, parse: Parse, stack: AsyncExitStack, started_s: float
    ) -> _Job:
        """Let the request in, read its form and check it; what it holds goes onto `stack`."""
        limit = self._settings.max_upload_bytes
        length = check_content_length(request.headers, limit)
        stack.enter_context(self._keys.request_of(getattr(request.state, "key_owner", None)))
        share = stack.enter_context(self.admission.admit(length or 0))
        form = await stack.enter_async_context(
            receive_form(
                request.headers,
                request.receive,
                max_upload_bytes=limit,
                spool_dir=self._spool_dir,
            )
        )
        upload_s = time.monotonic() - started_s
        self._recorder.observe("splitscribe_upload_seconds", upload_s)
        request_span(request.scope).stage("upload", started_s, upload_s, bytes=form.size_bytes)
        model = self._registry.find(requested_model(form.fields))
        params = parse(form.fields, model.languages)
        share.expect(form.size_bytes / BYTES_PER_AUDIO_S)
        return _Job(request, form.path, params, model.transcriber, share, started_s, upload_s)

    async def _whole(self, job: _Job) -> Response:
        logprobs: list[TokenLogprob] = []
        context = RequestContext(**self._context_fields(job))
        if job.params.logprobs:
            context.on_update = lambda update: logprobs.extend(update.logprobs)
        result = await self._run(job, context)
        rendered = render(
            result.transcript,
            job.params.response_format,
            words=job.params.words,
            segments=job.params.segments,
            logprobs=logprobs if job.params.logprobs else None,
        )
        timing = server_timing(
            result.timings, upload_s=job.upload_s, total_s=time.monotonic() - job.started_s
        )
        return Response(
            rendered.body, media_type=rendered.media_type, headers={"server-timing": timing}
        )

    async def _begin_stream(self, job: _Job, stack: AsyncExitStack) -> Response:
        stream = EventStream(job.params, self._heartbeat_s)
        context = StreamContext(
            **self._context_fields(job), on_update=stream.update, opened=stream.opened
        )
        await stream.begin(self._run(job, context))
        # No await from here to the response's own: what the stack holds always has an owner.
        stream.own(stack.pop_all())
        return EventStreamResponse(stream, {"server-timing": _stage("upload", job.upload_s)})

    async def _run(self, job: _Job, context: RequestContext) -> TranscriptionResult:
        work = job.transcriber.transcribe(job.upload, job.params, context)
        result = await supervise(work, job.request.receive, context)
        logger.info(
            "transcribed %.2f s of audio in %.3f s (%d windows)",
            result.transcript.duration_s,
            time.monotonic() - job.started_s,
            result.timings.windows,
            extra=told(duration_s=result.transcript.duration_s, **asdict(result.timings)),
        )
        return result

    def _context_fields(self, job: _Job) -> dict[str, Any]:
        return {
            "request_id": current_request_id(),
            "span": request_span(job.request.scope),
            "share": job.share,
            "min_deadline_s": self._settings.min_deadline_s,
            "deadline_factor": self._settings.deadline_factor,
            "max_deadline_s": self._settings.max_deadline_s,
        }


def server_timing(timings: StageTimings, *, upload_s: float, total_s: float) -> str:
    """The `server-timing` header: each stage's milliseconds, summed over parallel windows."""
    return ", ".join(
        (
            _stage("upload", upload_s),
            _stage("audio", timings.audio_s),
            _stage("queue", timings.queue_s),
            _stage("encode", timings.encode_s, f"{timings.windows} windows"),
            _stage("transfer", timings.transfer_s, f"{timings.transfer_bytes} bytes"),
            _stage("decode", timings.decode_s, f"{timings.steps} steps"),
            _stage("total", total_s),
        )
    )


def _stage(name: str, seconds: float, note: str = "") -> str:
    return f"{name};dur={1000 * seconds:.1f}" + (f';desc="{note}"' if note else "")

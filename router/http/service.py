"""One transcription request from its form to its answer.

Counts it against its key, admits it, reads and checks the body, runs the transcriber of the model
that it names until it is done or the client hangs up, and writes the answer, whole or as a stream.
What it holds is given back in the reverse order, however it ends. Errors are raised here and
written by `router.http.envelope`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request, Response

from cluster.common.clock import Clock
from cluster.common.errors import SplitscribeError
from cluster.common.logs import current_request_id, log_fields
from cluster.common.metrics import Recorder
from cluster.common.settings import RouterSettings
from router.api.formats import render
from router.api.forms import requested_model
from router.api.params import TranscriptionParams
from router.http.admission import (
    BYTES_PER_AUDIO_S,
    Admission,
    AdmittedRequest,
    telling_waits,
)
from router.http.keys import KeyRing
from router.http.middleware import request_span
from router.http.models import ModelRegistry
from router.http.multipart import FILE_FIELD
from router.http.sse import EventStream, EventStreamResponse, StreamContext
from router.http.supervise import supervise
from router.http.uploads import (
    FORM_OR_JSON,
    BodyShape,
    ClientDisconnectedError,
    check_content_length,
    receive_form,
)
from router.interface import (
    DeadlineRule,
    RequestContext,
    StageTimings,
    Transcriber,
    TranscriptionResult,
)
from router.transcript import TokenLogprob, Transcript

logger = logging.getLogger(__name__)

CLIENT_CLOSED = 499  # never seen by anyone but the access log

Parse = Callable[[Iterable[tuple[str, str]], Collection[str]], TranscriptionParams]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that was let in, read and checked."""

    request: Request
    upload: Path
    filename: str  # as the client named it; empty where it did not
    params: TranscriptionParams
    transcriber: Transcriber
    share: AdmittedRequest
    started_s: float  # the clock's
    upload_s: float


Write = Callable[[Transcript, CheckedRequest, list[TokenLogprob] | None], Response]


def write_as_openai(
    transcript: Transcript, checked: CheckedRequest, logprobs: list[TokenLogprob] | None
) -> Response:
    """The answer in the format that the request asks for."""
    params = checked.params
    rendered = render(
        transcript,
        params.response_format,
        words=params.words,
        segments=params.segments,
        logprobs=logprobs,
    )
    return Response(rendered.body, media_type=rendered.media_type)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How an endpoint's requests are read and answered.

    parse: checks the fields. write: makes the whole answer. shape: of the bodies.
    fields: what is asked for where that stands in the URL; None: the body has it.
    """

    parse: Parse
    write: Write = write_as_openai
    shape: BodyShape = FORM_OR_JSON
    fields: tuple[tuple[str, str], ...] | None = None


Work = Callable[[CheckedRequest, AsyncExitStack], Awaitable[Response]]


class TranscriptionService:
    """Answers the audio endpoints; one for all requests of a router."""

    def __init__(
        self,
        registry: ModelRegistry,
        settings: RouterSettings,
        keys: KeyRing,
        *,
        recorder: Recorder,
        clock: Clock,
        spool_dir: Path | None,
        heartbeat_s: float,
    ) -> None:
        self.admission = Admission(settings.max_pending_audio_s, clock.monotonic)
        self._deadline = DeadlineRule(
            settings.min_deadline_s, settings.deadline_factor, settings.max_deadline_s
        )
        self._registry = registry
        self._settings = settings
        self._keys = keys
        self._recorder = recorder
        self._clock = clock
        self._spool_dir = spool_dir
        self._heartbeat_s = heartbeat_s

    def report(self) -> None:
        """Tell the metrics what is pending; called once a second."""
        record = self._recorder.set
        record("splitscribe_pending_requests", self.admission.requests)
        record("splitscribe_pending_audio_seconds", self.admission.pending_audio_s)
        record("splitscribe_max_pending_audio_seconds", self._settings.max_pending_audio_s)

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Transcribe what came to an endpoint."""

        async def work(checked: CheckedRequest, stack: AsyncExitStack) -> Response:
            if checked.params.stream:
                return await self._begin_stream(checked, stack)
            return await self._whole(checked, endpoint.write)

        return await self._answer(request, endpoint, work)

    async def detect_language(
        self, request: Request, endpoint: Endpoint, write: Callable[[str, float], Response]
    ) -> Response:
        """Tell the language of what came to an endpoint; `write` gets its code and probability."""

        async def work(checked: CheckedRequest, _: AsyncExitStack) -> Response:
            context = RequestContext(**self._context_fields(checked))
            detecting = checked.transcriber.detect_language(checked.upload, context)
            return write(*await supervise(detecting, request.receive, context))

        return await self._answer(request, endpoint, work)

    async def _answer(self, request: Request, endpoint: Endpoint, work: Work) -> Response:
        started_s = self._clock.monotonic()
        try:
            async with AsyncExitStack() as stack:
                return await work(await self._receive(request, endpoint, stack, started_s), stack)
        except SplitscribeError as error:
            if error.param == FILE_FIELD:  # as all that reads audio calls it
                error.param = endpoint.shape.audio_field(request.headers)
            raise
        except ClientDisconnectedError:
            logger.info("the client hung up after %.1f s", self._clock.monotonic() - started_s)
            return Response(status_code=CLIENT_CLOSED)
        except asyncio.CancelledError:  # Serve cancels a request whose client has hung up
            logger.info("given up by its caller after %.1f s", self._clock.monotonic() - started_s)
            raise

    async def _receive(
        self, request: Request, endpoint: Endpoint, stack: AsyncExitStack, started_s: float
    ) -> CheckedRequest:
        """Let the request in, read its body and check it; what it holds goes onto `stack`."""
        limit = self._settings.max_upload_bytes
        length = check_content_length(request.headers, limit)
        stack.enter_context(self._keys.request_of(_key_owner(request)))
        share = stack.enter_context(self.admission.admit(length or 0))
        form = await stack.enter_async_context(
            receive_form(
                request.headers,
                request.receive,
                max_upload_bytes=limit,
                spool_dir=self._spool_dir,
                shape=endpoint.shape,
            )
        )
        fields = form.fields if endpoint.fields is None else endpoint.fields
        upload_s = self._clock.monotonic() - started_s
        self._recorder.observe("splitscribe_upload_seconds", upload_s)
        request_span(request.scope).stage("upload", started_s, upload_s, bytes=form.size_bytes)
        model = self._registry.find(requested_model(fields))
        params = endpoint.parse(fields, model.languages)
        share.expect(form.size_bytes / BYTES_PER_AUDIO_S)
        return CheckedRequest(
            request,
            form.path,
            form.filename,
            params,
            model.transcriber,
            share,
            started_s,
            upload_s,
        )

    async def _whole(self, checked: CheckedRequest, write: Write) -> Response:
        logprobs: list[TokenLogprob] = []
        context = RequestContext(**self._context_fields(checked))
        if checked.params.logprobs:
            context.on_update = lambda update: logprobs.extend(update.logprobs)
        result = await self._run(checked, context)
        answer = write(result.transcript, checked, logprobs if checked.params.logprobs else None)
        timing = self._timing(checked, result.timings)
        answer.headers.update({"server-timing": timing, **cache_header(result.timings)})
        return answer

    async def _begin_stream(self, checked: CheckedRequest, stack: AsyncExitStack) -> Response:
        tell_timing = partial(self._timing, checked)
        stream = EventStream(checked.params, tell_timing, self._heartbeat_s)
        context = StreamContext(
            **self._context_fields(checked), on_update=stream.update, opened=stream.opened
        )
        await stream.begin(self._run(checked, context))
        # No await from here to the response's own: what the stack holds always has an owner.
        stream.own(stack.pop_all())
        return EventStreamResponse(stream, {"server-timing": _stage("upload", checked.upload_s)})

    async def _run(self, checked: CheckedRequest, context: RequestContext) -> TranscriptionResult:
        work = checked.transcriber.transcribe(checked.upload, checked.params, context)
        watched = supervise(work, checked.request.receive, context)
        result = await telling_waits(checked.share, context, watched)
        logger.info(
            "transcribed %.2f s of audio in %.3f s (%d windows)",
            result.transcript.duration_s,
            self._clock.monotonic() - checked.started_s,
            result.timings.windows,
            extra=log_fields(duration_s=result.transcript.duration_s, **asdict(result.timings)),
        )
        return result

    def _timing(self, checked: CheckedRequest, timings: StageTimings) -> str:
        """Where the time of a request went that is done now, as `server_timing` writes it."""
        total_s = self._clock.monotonic() - checked.started_s
        return server_timing(timings, upload_s=checked.upload_s, total_s=total_s)

    def _context_fields(self, checked: CheckedRequest) -> dict[str, Any]:
        return {
            "request_id": current_request_id(),
            "span": request_span(checked.request.scope),
            "share": checked.share,
            "deadline": self._deadline,
            "clock": self._clock,
            "owner": self._keys.owner_digest(_key_owner(checked.request)),
        }


def cache_header(timings: StageTimings) -> dict[str, str]:
    """Whether the windows' KV was there already: hit (of all), miss (of none) or partial.

    Empty where nothing is kept.
    """
    hits, windows = timings.cache_hits, timings.cache_hits + timings.cache_misses
    if not windows:
        return {}
    found = "hit" if hits == windows else "partial" if hits else "miss"
    return {"x-splitscribe-cache": f"{found};hits={hits};windows={windows}"}


def _key_owner(request: Request) -> int | None:
    """Number of the API key that it came with; None where none is needed."""
    owner: int | None = getattr(request.state, "key_owner", None)
    return owner


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

"""Serve one transcription request from its form to its answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from cluster.common.errors import InvalidRequestError, SplitscribeError, WorkerError
from cluster.common.logs import counted, current_request_id
from router.api.formats import render
from router.api.forms import requested_model
from router.api.params import TranscriptionParams
from router.http.admission import BYTES_PER_AUDIO_S, Admission, AdmittedRequest
from router.http.bodies import FILE_FIELD
from router.http.envelope import notes_of
from router.http.keys import AtOnce
from router.http.models import ServedModel
from router.http.shared import Shared
from router.http.sse import EventStream
from router.http.uploads import (
    FORM_OR_JSON,
    BodyShape,
    check_content_length,
    receive_form,
)
from router.interface import (
    TIMEOUT_HEADER,
    RequestContext,
    StageTimings,
    TranscriptionResult,
)
from router.transcript import TokenLogprob, Transcript

logger = logging.getLogger(__name__)

MAX_UPLOADS = 512  # of one client at once
MAX_PARSED_AT_ONCE = 262_144  # characters of fields; longer ones are parsed in a thread
GRACE_S = 1.0  # beyond the deadline: the pipeline's own error has a better message

T = TypeVar("T")
Parse = Callable[[Iterable[tuple[str, str]], Collection[str]], TranscriptionParams]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    request: Request
    upload: Path
    filename: str  # from the client; empty if it sent none
    params: TranscriptionParams
    model: ServedModel
    share: AdmittedRequest
    started_s: float
    upload_s: float


Write = Callable[[Transcript, CheckedRequest, list[TokenLogprob]], Response]


def write_as_openai(
    transcript: Transcript, checked: CheckedRequest, logprobs: list[TokenLogprob]
) -> Response:
    body, media_type = render(transcript, checked.params, logprobs)
    return Response(body, media_type=media_type)


@dataclass(frozen=True, slots=True)
class Endpoint:
    parse: Parse
    write: Write = write_as_openai
    shape: BodyShape = FORM_OR_JSON
    fields: tuple[tuple[str, str], ...] | None = None  # from the URL, in place of the form's
    detect: Callable[[str, float], Response] | None = None  # answers with the language alone


class TranscriptionService:
    def __init__(self, shared: Shared) -> None:
        most_s = shared.settings.max_pending_audio_s
        self.admission = Admission(most_s, shared.clock.monotonic)
        self._upload_of = AtOnce("uploads", MAX_UPLOADS).one_of
        self._shared = shared

    def report(self) -> None:
        if self.admission.requests:
            self._shared.registry.look()  # notes whether the pools have workers
        record = self._shared.recorder.set
        record("splitscribe_pending_requests", self.admission.requests)
        record("splitscribe_pending_audio_seconds", self.admission.pending_audio_s)
        record("splitscribe_max_pending_audio_seconds", self._shared.settings.max_pending_audio_s)

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Raises SplitscribeError."""
        started_s = self._shared.clock.monotonic()
        try:
            async with AsyncExitStack() as stack:
                checked = await self._receive(request, endpoint, stack, started_s)
                context = self._context(checked)
                if endpoint.detect is not None:
                    detecting = checked.model.transcriber.detect_language(checked.upload, context)
                    return endpoint.detect(*await supervise(detecting, request.receive, context))
                if checked.params.stream:
                    return await self._begin_stream(checked, context, stack)
                return await self._whole(checked, context, endpoint.write)
        except SplitscribeError as error:
            if error.param == FILE_FIELD:  # the name in all errors about audio
                error.param = endpoint.shape.audio_field(request.headers)
            raise
        except asyncio.CancelledError:  # Serve cancels a request when its client hangs up
            logger.info(
                "given up by its caller after %.1f s", self._shared.clock.monotonic() - started_s
            )
            raise

    async def _receive(
        self, request: Request, endpoint: Endpoint, stack: AsyncExitStack, started_s: float
    ) -> CheckedRequest:
        """Admit the request, then read and check it. `stack` releases its resources."""
        limit = self._shared.settings.max_upload_bytes
        length = check_content_length(request.headers, limit)
        notes = notes_of(request.scope)
        owner = notes.owner
        stack.enter_context(self._shared.keys.request_of(owner))
        share = stack.enter_context(self.admission.admit(length or 0))
        self._shared.usage.begin(owner)  # counts requests that were admitted

        async def chunks() -> AsyncIterator[bytes]:
            async for chunk in request.stream():
                share.received(len(chunk))
                yield chunk

        form = receive_form(request.headers, chunks(), max_upload_bytes=limit, shape=endpoint.shape)
        with self._upload_of(_address(request) if owner is None else owner):
            uploaded = await stack.enter_async_context(form)
        fields = uploaded.fields if endpoint.fields is None else endpoint.fields
        upload_s = self._shared.clock.monotonic() - started_s
        self._shared.recorder.observe("splitscribe_upload_seconds", upload_s)
        notes.span.stage("upload", started_s, upload_s, bytes=uploaded.size_bytes)
        model = self._shared.registry.find(requested_model(fields))
        parse = partial(endpoint.parse, fields, model.languages)
        is_long = sum(len(text) for _, text in fields) > MAX_PARSED_AT_ONCE
        params = await asyncio.to_thread(parse) if is_long else parse()
        share.expect(uploaded.size_bytes / BYTES_PER_AUDIO_S)
        return CheckedRequest(
            request,
            uploaded.path,
            uploaded.filename,
            params,
            model,
            share,
            started_s,
            upload_s,
        )

    def _context(self, checked: CheckedRequest) -> RequestContext:
        notes = notes_of(checked.request.scope)
        owner = self._shared.keys.owner_digest(notes.owner)
        return RequestContext(
            current_request_id(),
            checked.share,
            self._shared.settings.stall_timeout_s,
            _timeout_s(checked.request),
            clock=self._shared.clock,
            progress=checked.model.progress,
            span=notes.span,
            owner=owner,
            client=owner or (_address(checked.request) or "").encode(),
        )

    async def _whole(
        self, checked: CheckedRequest, context: RequestContext, write: Write
    ) -> Response:
        logprobs: list[TokenLogprob] = []
        context.on_update = lambda update: logprobs.extend(update.logprobs)
        result = await self._run(checked, context)
        answer = write(result.transcript, checked, logprobs)
        timing = self._timing(checked, result.timings)
        answer.headers.update({"server-timing": timing, **cache_header(result.timings)})
        return answer

    async def _begin_stream(
        self, checked: CheckedRequest, context: RequestContext, stack: AsyncExitStack
    ) -> Response:
        tell_timing = partial(self._timing, checked)
        headers = {"server-timing": _stage("upload", checked.upload_s)}
        stream = EventStream(checked.params, checked.share, tell_timing, headers)
        context.share, context.on_update = stream, stream.update
        if checked.params.response_format == "verbose_json":
            context.on_progress = stream.progress
        await stream.begin(self._run(checked, context), stack)
        return stream

    async def _run(self, checked: CheckedRequest, context: RequestContext) -> TranscriptionResult:
        work = checked.model.transcriber.transcribe(checked.upload, checked.params, context)
        result = await supervise(work, checked.request.receive, context)
        if checked.model.progress.asleep_s < checked.started_s:  # no wait for a worker to start
            checked.share.done(result.timings)
        duration_s = result.transcript.duration_s
        notes = notes_of(checked.request.scope)
        self._shared.usage.add_audio(notes.owner, result.transcript.transcribed_s)
        told = {"duration_s": duration_s, "upload_s": checked.upload_s}
        notes.work = {**told, **asdict(result.timings)}
        return result

    def _timing(self, checked: CheckedRequest, timings: StageTimings) -> str:
        """The header `server-timing` of a finished request: ms, summed over parallel windows."""
        stages = (
            ("upload", checked.upload_s, ""),
            ("audio", timings.audio_s, ""),
            ("queue", timings.queue_s, ""),
            ("encode", timings.encode_s, counted(timings.windows, "window")),
            ("transfer", timings.transfer_s, f"{timings.transfer_bytes} bytes"),
            ("decode", timings.decode_s, counted(timings.steps, "step")),
            ("total", self._shared.clock.monotonic() - checked.started_s, ""),
        )
        return ", ".join(_stage(*stage) for stage in stages)


async def supervise(work: Coroutine[Any, Any, T], receive: Receive, context: RequestContext) -> T:
    """Await `work`, but cancel it and await its end at a hang-up or after the deadline, which may
    be extended meanwhile. `receive` must be at the end of the body.

    Raises ClientDisconnect, DeadlineExceededError, or what `work` raises.
    """
    task = asyncio.ensure_future(work)
    hang_up = asyncio.ensure_future(_hang_up(receive))
    try:
        while (left_s := context.remaining_s() + GRACE_S) > 0:
            await asyncio.wait({task, hang_up}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if task.cancelled():  # by something inside: our caller was not cancelled
                raise WorkerError("the work was cancelled inside the cluster")
            if task.done():
                return task.result()
            if hang_up.done():
                raise ClientDisconnect
        raise context.too_late()
    finally:
        task.cancel()
        hang_up.cancel()
        await asyncio.gather(task, hang_up, return_exceptions=True)


def _address(request: Request) -> str | None:
    """The client's address, also behind a proxy that uvicorn was told to trust."""
    return request.client.host if request.client else None


def _timeout_s(request: Request) -> float:
    """The value of `TIMEOUT_HEADER`; infinite without it. Raises InvalidRequestError."""
    sent = request.headers.get(TIMEOUT_HEADER, "inf")
    with suppress(ValueError):
        if (seconds := float(sent)) > 0.0:
            return seconds
    raise InvalidRequestError(
        f"'{TIMEOUT_HEADER}' must be a number of seconds above 0, not '{sent[:32]}'",
        param=TIMEOUT_HEADER,
        code="invalid_value",
    )


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def cache_header(timings: StageTimings) -> dict[str, str]:
    """The header that tells how many windows' KV came from the cache; empty without a cache."""
    hits, windows = timings.cache_hits, timings.cache_hits + timings.cache_misses
    if not windows:
        return {}
    found = "hit" if hits == windows else "partial" if hits else "miss"
    return {"x-splitscribe-cache": f"{found};hits={hits};windows={windows}"}


def _stage(name: str, seconds: float, note: str = "") -> str:
    return f"{name};dur={1000 * seconds:.1f}" + (f';desc="{note}"' if note else "")

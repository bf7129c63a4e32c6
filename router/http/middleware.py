"""The outermost layer of the HTTP application: request ids, access control, answers for crashes,
and the access log. It is pure ASGI, so that `receive` still delivers a client's hang-up.
"""

from __future__ import annotations

import logging
import re
import uuid

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from cluster.common.errors import SplitscribeError
from cluster.common.logs import counted, log_fields, request_scope
from cluster.common.tracing import NO_SPAN, NO_TRACER, Span, Tracer
from router.http.access import Access, refuse_upgrade
from router.http.envelope import (
    ASR_PATHS,
    Notes,
    UnexpectedError,
    answer_error,
    error_response,
    note_error,
    notes_of,
    shown_path,
)
from router.http.shared import Shared

logger = logging.getLogger(__name__)

API_PREFIXES = ("/v1/", *ASR_PATHS)  # counted and logged
TRACED_PREFIXES = ("/v1/audio/", *ASR_PATHS)
STARTS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
MAX_REQUEST_ID = 128  # characters
_STAGES = ("upload", "audio", "queue", "encode", "transfer", "decode")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:/+=-]")


class AnswerBrokenError(Exception):
    """An answer failed after its status was sent. The cause was logged before."""


class RequestMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        shared: Shared,
        access: Access,
        tracer: Tracer = NO_TRACER,
        echo_request_id: bool = True,
    ) -> None:
        self._app = app
        self._shared = shared
        self._access = access
        self._tracer = tracer
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        is_http = scope["type"] == "http"
        request_id = accept_request_id(scope)
        started_s = self._shared.clock.monotonic()
        status = 0  # until it is sent; a WebSocket has one only if it is refused

        async def send_stamped(message: Message) -> None:
            nonlocal status
            if message["type"] in STARTS:
                status = message.get("status", 0)
                message = {**message, "headers": list(message.get("headers", []))}
                headers = MutableHeaders(scope=message)
                if self._echo_request_id:
                    headers["x-request-id"] = request_id
                if is_http:
                    elapsed_ms = 1000 * (self._shared.clock.monotonic() - started_s)
                    headers["openai-processing-ms"] = str(round(elapsed_ms))
            await send(message)

        with request_scope(request_id), self._span(scope, request_id) as span:
            notes = notes_of(scope)
            notes.span = span
            try:
                await self._admitted(scope, receive, send_stamped)
            except Exception:
                logger.exception(
                    "%s %s failed", scope.get("method", "WebSocket"), shown_path(scope)
                )
                note_error(scope, UnexpectedError(request_id))
                if status or not is_http:
                    # The server cuts the connection, so that the answer does not seem whole.
                    # `from None`: its log must not say more than our line.
                    raise AnswerBrokenError from None
                await error_response(UnexpectedError(request_id))(scope, receive, send_stamped)
            finally:
                if status and scope["path"].startswith(API_PREFIXES):
                    wall_s = self._shared.clock.monotonic() - started_s
                    self._count(status, notes.error, wall_s)
                    if is_http:  # WebSockets have their own log lines
                        self._log(scope, notes, status, wall_s)
                    span.note(http__response__status_code=status)
                    if notes.error is not None:
                        span.note(error=notes.error)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            receive = self._access.enter(scope, receive)
        except SplitscribeError as error:
            if scope["type"] == "websocket":
                await refuse_upgrade(WebSocket(scope, receive, send), error)
            else:
                await answer_error(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _span(self, scope: Scope, request_id: str) -> Span:
        """A span for the whole answer, its stream included. Only transcriptions are traced."""
        is_traced = scope["type"] == "http" and scope["path"].startswith(TRACED_PREFIXES)
        if self._tracer is NO_TRACER or not is_traced:
            return NO_SPAN
        return self._tracer.root(
            f"{scope['method']} {scope['path']}",
            Headers(scope=scope).get("traceparent", ""),
            request_id=request_id,
            http__request__method=scope["method"],
            url__path=scope["path"],
        )

    def _log(self, scope: Scope, notes: Notes, status: int, wall_s: float) -> None:
        key, work = self._shared.keys.name(notes.owner), notes.work
        path = shown_path(scope)
        text = f"{scope['method']} {path} {status} in {wall_s:.3f} s"
        if key:
            text += f" by {key}"
        if work:
            stages = ", ".join(f"{name} {work[f'{name}_s']:.3f}" for name in _STAGES)
            windows = counted(work["windows"], "window")
            text += f": transcribed {work['duration_s']:.2f} s of audio in {windows} ({stages})"
        fields = {"method": scope["method"], "path": path, "status": status, "wall_s": wall_s}
        logger.info("%s", text, extra=log_fields(**fields, key=key, **work))

    def _count(self, status: int, code: str | None, wall_s: float) -> None:
        self._shared.recorder.add("splitscribe_requests_total", status=str(status))
        if code is not None:
            self._shared.recorder.add("splitscribe_errors_total", status=str(status), code=code)
        self._shared.recorder.observe("splitscribe_request_seconds", wall_s)


def accept_request_id(scope: Scope) -> str:
    """The client's id without characters that could forge a log line, or a new one."""
    sent = Headers(scope=scope).get("x-request-id", "")
    cleaned = _NOT_IN_IDS.sub("", sent)[:MAX_REQUEST_ID]
    return cleaned or f"req_{uuid.uuid4().hex}"

"""Write errors as HTTP answers in OpenAI's envelope, the only shape that OpenAI's clients show."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from cluster.common.errors import AuthenticationError, InvalidRequestError, SplitscribeError
from cluster.common.tracing import NO_SPAN, Span
from router.api.responses import envelope, error_body

logger = logging.getLogger(__name__)

ASR_PATHS = ("/asr", "/detect-language")  # their clients read `detail`, as FastAPI writes it
MAX_PATH = 256  # characters of a path in a log line
CLIENT_CLOSED = 499  # appears in the access log only
RETRY_AFTER_S = 1.0  # for a 429 or 503 whose error gives no time


def error_response(error: SplitscribeError) -> JSONResponse:
    return JSONResponse(error_body(error), error.status, _retry_headers(error))


class UnexpectedError(SplitscribeError):
    """A bug in the server. The client gets the request id and no details."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The server had an error while processing your request. If you report it, "
            f"give this request id: {request_id}"
        )


def shown_path(scope: Mapping[str, Any]) -> str:
    """The path, percent-encoded so that it cannot forge a log line."""
    return quote(scope["path"])[:MAX_PATH]


@dataclass(slots=True)
class Notes:
    """Facts about a request that are gathered on its way, and counted and logged at its end."""

    owner: int | None = None  # number of the API key; None without keys
    error: str | None = None  # code, or else class name, of the error that ended it
    span: Span = NO_SPAN
    work: Mapping[str, Any] = field(default_factory=dict)  # its cost, by names of log fields


def notes_of(scope: MutableMapping[str, Any]) -> Notes:
    found: Notes = scope.setdefault("state", {}).setdefault("notes", Notes())
    return found


def note_error(scope: MutableMapping[str, Any], error: SplitscribeError) -> None:
    notes_of(scope).error = error.code or type(error).__name__


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(SplitscribeError, _on_splitscribe_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)


async def _on_splitscribe_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, SplitscribeError)
    return answer_error(request, error)


def answer_error(request: Request, error: SplitscribeError) -> Response:
    if error.status < 500:  # the message may quote what the client sent
        level, what = logging.INFO, error.code or error.type
    else:
        level, what = logging.WARNING, error.message
    logger.log(
        level,
        "%s %s: %d %s: %s",
        request.method,
        shown_path(request.scope),
        error.status,
        type(error).__name__,
        what,
    )
    note_error(request.scope, error)
    detail = {"detail": error.message} if request.url.path in ASR_PATHS else {}
    return JSONResponse(detail | error_body(error), error.status, _retry_headers(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {shown_path(request.scope)}"
    code: str | None
    match error.status_code:
        case 404:
            message, code = f"unknown request URL: {asked}", "unknown_url"
        case 405:
            message, code = f"this method is not allowed: {asked}", "method_not_allowed"
        case _:
            message, code = str(error.detail), None
    note_error(request.scope, SplitscribeError(message, code=code or f"http_{error.status_code}"))
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    headers = dict(error.headers or {})
    if error.status_code < 500:
        headers["x-should-retry"] = "false"
    return JSONResponse(envelope(message, kind, None, code), error.status_code, headers)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    code = "invalid_value" if first["type"] == "literal_error" else None
    refusal = InvalidRequestError(f"'{name}': {first['msg']}", param=name, code=code)
    return answer_error(request, refusal)


async def _on_disconnect(request: Request, _: Exception) -> Response:
    logger.info("%s %s: the client hung up", request.method, shown_path(request.scope))
    return Response(status_code=CLIENT_CLOSED)


def _retry_headers(error: SplitscribeError) -> dict[str, str]:
    headers = {}
    if error.should_retry is not None:
        headers["x-should-retry"] = "true" if error.should_retry else "false"
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.status in (429, 503):
        retry_after_s = RETRY_AFTER_S
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    return headers

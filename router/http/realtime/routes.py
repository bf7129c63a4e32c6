"""The three paths under `/v1/realtime`, and the bodies of the two that are not a WebSocket."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket

from cluster.common.errors import InvalidRequestError
from router.api.documents import parse_document
from router.api.openapi import whole_schema
from router.http.bodies import JSON_TYPE, media_type
from router.http.keys import key_owner
from router.http.realtime.access import MAX_S, MIN_S, USUAL_S
from router.http.realtime.service import RealtimeService
from router.http.uploads import small_body

MAX_BODY_BYTES = 65_536  # a secret holds at most 6,000 characters, after compression

Body = TypeVar("Body", bound=BaseModel)


class ExpiresAfter(BaseModel):
    """When a client secret ends."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(USUAL_S, ge=MIN_S, le=MAX_S)


class ClientSecretRequest(BaseModel):
    """The body of a request for a client secret."""

    expires_after: ExpiresAfter | None = None
    session: dict[str, Any] | None = Field(
        None, description="configuration of its sessions: a transcription session of OpenAI's API"
    )


class ClientSecretResponse(BaseModel):
    value: str = Field(description="the secret, which is sent as a key")
    expires_at: int = Field(description="Unix time; sessions that are open at that time go on")
    session: dict[str, Any]


class BetaSecretRequest(BaseModel):
    expires_at: ExpiresAfter | None = None
    expires_after: ExpiresAfter | None = None


class BetaSessionRequest(BaseModel):
    """A session in the beta's flat shape, and how long its secret is valid."""

    model_config = ConfigDict(extra="allow")

    client_secret: BetaSecretRequest | None = None


def add_realtime(app: FastAPI, api: APIRouter, service: RealtimeService) -> None:
    """Add the WebSocket, which checks keys itself, to `app`, and the other paths to `api`."""

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await service.serve(websocket)

    @app.get("/v1/realtime", include_in_schema=False)
    async def upgrade_required() -> None:
        raise HTTPException(426, "connect to /v1/realtime by WebSocket", {"upgrade": "websocket"})

    @api.post(
        "/realtime/client_secrets",
        tags=["realtime"],
        summary="Make a client secret",
        openapi_extra=_described(ClientSecretRequest),
    )
    async def create_client_secret(request: Request) -> ClientSecretResponse:
        """A key for a browser: it opens realtime sessions until it expires, and nothing else."""
        body = await _body(request, ClientSecretRequest)
        seconds = (body.expires_after or ExpiresAfter()).seconds
        made = service.create_secret(key_owner(request), body.session or {}, seconds)
        return ClientSecretResponse(**made)

    @api.post(
        "/realtime/transcription_sessions",
        tags=["realtime"],
        summary="Make a client secret, in the beta's shape",
        openapi_extra=_described(BetaSessionRequest),
    )
    async def create_transcription_session(request: Request) -> dict[str, Any]:
        """The same for clients of the beta of OpenAI's realtime API."""
        body = await _body(request, BetaSessionRequest)
        wanted = body.client_secret or BetaSecretRequest()
        expiry = wanted.expires_at or wanted.expires_after or ExpiresAfter()
        session = body.model_extra or {}
        return service.create_secret(key_owner(request), session, expiry.seconds, is_beta=True)


def _described(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": whole_schema(model)}}
    return {"requestBody": {"required": False, "content": content}}


async def _body(request: Request, model: type[Body]) -> Body:
    """The body, once the key is known; without one the defaults. Raises SplitscribeError."""
    content = await small_body(request.receive, MAX_BODY_BYTES)
    if content and media_type(request.headers) != JSON_TYPE:
        raise InvalidRequestError("the body must be JSON, with content-type application/json")
    return parse_document(model, content or b"{}")

"""The three paths under `/v1/realtime`, and the bodies of the two that are not a WebSocket."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket

from router.http.realtime.client_secrets import MAX_S, MIN_S, USUAL_S
from router.http.realtime.service import RealtimeService


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

    @api.post("/realtime/client_secrets", tags=["realtime"], summary="Make a client secret")
    async def create_client_secret(
        request: Request, body: ClientSecretRequest | None = None
    ) -> ClientSecretResponse:
        """A key for a browser: it opens realtime sessions until it expires, and nothing else."""
        body = body or ClientSecretRequest()
        seconds = (body.expires_after or ExpiresAfter()).seconds
        made = service.create_secret(_owner(request), body.session or {}, seconds)
        return ClientSecretResponse(**made)

    @api.post(
        "/realtime/transcription_sessions",
        tags=["realtime"],
        summary="Make a client secret, in the beta's shape",
    )
    async def create_transcription_session(
        request: Request, body: BetaSessionRequest | None = None
    ) -> dict[str, Any]:
        """The same for clients of the beta of OpenAI's realtime API."""
        body = body or BetaSessionRequest()
        wanted = body.client_secret or BetaSecretRequest()
        expiry = wanted.expires_at or wanted.expires_after or ExpiresAfter()
        session = body.model_extra or {}
        return service.create_beta_session(_owner(request), session, expiry.seconds)


def _owner(request: Request) -> int | None:
    owner: int | None = getattr(request.state, "key_owner", None)
    return owner

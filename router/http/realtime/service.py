"""The routes of realtime sessions and client secrets. Clients are refused before the upgrade."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster.common.errors import (
    InvalidRequestError,
    OverloadedError,
    RateLimitError,
    SplitscribeError,
    UnsupportedValueError,
)
from cluster.common.logs import log_fields
from router.api.documents import parse_document
from router.api.openapi import whole_schema
from router.http.access import refuse_upgrade
from router.http.bodies import JSON_TYPE, media_type
from router.http.envelope import notes_of
from router.http.models import ALIAS, LIVE_ALIASES
from router.http.realtime.access import (
    MAX_S,
    MIN_S,
    SUBPROTOCOL,
    USUAL_S,
    ClientSecret,
    ClientSecrets,
    authorised,
)
from router.http.realtime.connection import RealtimeConnection
from router.http.shared import Shared
from router.live.interface import LiveConfig
from router.live.protocol.events import RealtimeWriter
from router.live.protocol.session_config import (
    ModelNames,
    SessionConfig,
    as_session,
    known_fields,
    updated,
)
from router.live.protocol.session_protocol import LiveProtocol
from router.live.session import LiveSession

logger = logging.getLogger(__name__)

NO_ROOM = (429, 503)  # statuses of refusals that a later try may avoid
RETRY_AFTER_S = 5.0
DRAIN_S = 26.0  # for all sessions; longer than a connection's limit


class RealtimeService:
    def __init__(self, shared: Shared, secrets: ClientSecrets, *, is_proxied: bool) -> None:
        self._shared = shared
        self._secrets = secrets
        self._is_proxied = is_proxied
        self._names = ModelNames(
            languages=lambda name: shared.registry.find(name).languages,
            are_one=lambda one, other: shared.registry.find(one) is shared.registry.find(other),
            without_vad=LIVE_ALIASES,
        )
        self._owners: list[int | None] = []  # number of each open session's key; None without keys
        self._all_ended = asyncio.Event()
        self.draining = asyncio.Event()  # set while the router stops

    @property
    def sessions(self) -> int:
        return len(self._owners)

    def report(self) -> None:
        self._shared.recorder.set("splitscribe_live_sessions", self.sessions)

    async def drain(self) -> None:
        """Refuse new sessions, and close the open ones with 1012 when their turns have ended."""
        self.draining.set()
        if not self._owners:
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._all_ended.wait()
        except TimeoutError:
            logger.warning("%d realtime sessions did not end in time", self.sessions)

    async def serve(self, websocket: WebSocket) -> None:
        try:
            secret = authorised(websocket, self._shared.keys, self._secrets)
            if self.draining.is_set():
                raise OverloadedError(
                    "The server is restarting. Please connect again.", code="overloaded"
                )
            with self._occupied(secret.owner):
                self._shared.usage.begin(secret.owner)
                await self._run(websocket, self._begin(websocket, secret), secret.owner)
        except SplitscribeError as error:
            if websocket.application_state.name != "CONNECTING":
                raise
            if error.status in NO_ROOM:
                code = error.code or error.type
                self._shared.recorder.add("splitscribe_live_refused_total", code=code)
            await refuse_upgrade(websocket, error)

    @contextmanager
    def _occupied(self, owner: int | None) -> Iterator[None]:
        """Count a session of this key while it is open. Raises RateLimitError."""
        limits = self._shared.settings.live
        if owner is not None and limits.max_sessions_per_key:
            of_key = self._owners.count(owner)
            _check_room(of_key, limits.max_sessions_per_key, "This API key has")
        _check_room(self.sessions, limits.max_sessions, "This server has")
        self._owners.append(owner)
        self._all_ended.clear()
        try:
            yield
        finally:
            self._owners.remove(owner)
            if not self._owners:
                self._all_ended.set()

    async def _run(self, websocket: WebSocket, protocol: LiveProtocol, owner: int | None) -> None:
        offered = websocket.scope.get("subprotocols", [])
        try:
            await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        except BaseException as error:
            await protocol.session.close()
            if isinstance(error, WebSocketDisconnect | RuntimeError | OSError):
                return  # the client has gone
            raise
        connection = RealtimeConnection(
            websocket,
            protocol,
            self._shared.settings.live,
            self._shared.clock,
            draining=self.draining,
            is_proxied=self._is_proxied,
        )
        started_s = self._shared.clock.monotonic()
        logger.info("realtime session %s opened", protocol.session_id)
        try:
            ending = await connection.run()
        finally:
            self._shared.usage.add_audio(owner, protocol.completed_s)
        key, wall_s = self._shared.keys.name(owner), self._shared.clock.monotonic() - started_s
        logger.info(
            "realtime session %s closed after %.1f s%s, with %.2f s of audio in turns: %s",
            protocol.session_id,
            wall_s,
            f" by {key}" if key else "",
            protocol.completed_s,
            ending.reason or ending.code,
            extra=log_fields(key=key, wall_s=wall_s, duration_s=protocol.completed_s),
        )

    def _begin(self, websocket: WebSocket, secret: ClientSecret) -> LiveProtocol:
        """Raises SplitscribeError: unknown model, unsupported intent, or no capacity."""
        query = websocket.query_params
        if (intent := query.get("intent", "transcription")) != "transcription":
            raise UnsupportedValueError(
                f"intent '{intent[:64]}' is not supported; the only one is 'transcription'",
                param="intent",
            )
        writer = RealtimeWriter(self._shared.clock.random)
        config = self._first_config(query.get("model"))
        if secret.session:
            config = updated(config, secret.session, self._names)
        owner = self._shared.keys.owner_digest(secret.owner)

        def open_session(live: LiveConfig) -> LiveSession:
            engine = self._shared.registry.find(live.model).live
            if engine is None:
                raise UnsupportedValueError(
                    f"the model '{live.model}' does not support realtime sessions", param="model"
                )
            return engine.open(live, session_id=writer.new_id("live"), owner=owner)

        lifetime_s = self._shared.settings.live.max_session_s
        return LiveProtocol(
            config,
            names=self._names,
            open_session=open_session,
            writer=writer,
            expires_at=int(time.time() + lifetime_s),
            is_configured=bool(secret.session),
        )

    def _first_config(self, model: str | None) -> SessionConfig:
        """The configuration of a session before its first update. Raises ModelNotFoundError."""
        name = model or self._shared.registry.find(ALIAS).names[0]
        base = SessionConfig(live=LiveConfig(model=name))
        return updated(base, {}, self._names)

    def create_secret(
        self, owner: int | None, session: dict[str, Any], seconds: int
    ) -> ClientSecretResponse:
        config = updated(self._first_config(None), session, self._names)
        value, expires_at = self._secrets.issue(owner, known_fields(session), seconds)
        session_id = RealtimeWriter(self._shared.clock.random).new_id("sess")
        written = as_session(config, session_id, expires_at)
        return ClientSecretResponse(value=value, expires_at=expires_at, session=written)


def _check_room(taken: int, most: int, who: str) -> None:
    if taken >= most:
        raise RateLimitError(
            f"{who} {taken} realtime sessions open, which is the most that are allowed. Please try "
            f"again when one has ended.",
            retry_after_s=RETRY_AFTER_S,
        )


# ---- the paths, and the bodies of the one that is not a WebSocket


class ExpiresAfter(BaseModel):
    """The time at which a client secret expires."""

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


def add_realtime(app: FastAPI, api: APIRouter, service: RealtimeService) -> None:
    """Add the WebSocket, which checks keys itself, to `app`, and the other path to `api`."""

    @app.websocket("/v1/realtime")
    async def realtime(websocket: WebSocket) -> None:
        await service.serve(websocket)

    @app.get("/v1/realtime", include_in_schema=False)
    async def upgrade_required() -> None:
        raise HTTPException(426, "connect to /v1/realtime by WebSocket", {"upgrade": "websocket"})

    content = {"application/json": {"schema": whole_schema(ClientSecretRequest)}}

    @api.post(
        "/realtime/client_secrets",
        tags=["realtime"],
        summary="Make a client secret",
        openapi_extra={"requestBody": {"required": False, "content": content}},
    )
    async def create_client_secret(request: Request) -> ClientSecretResponse:
        """A key for a browser: it opens realtime sessions until it expires, and nothing else."""
        sent = await request.body()
        if sent and media_type(request.headers) != JSON_TYPE:
            raise InvalidRequestError("the body must be JSON, with content-type application/json")
        body = parse_document(ClientSecretRequest, sent or b"{}")
        seconds = (body.expires_after or ExpiresAfter()).seconds
        return service.create_secret(notes_of(request.scope).owner, body.session or {}, seconds)

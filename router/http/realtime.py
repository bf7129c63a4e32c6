"""Who may open a realtime session, and how it begins: `/v1/realtime` and its client secrets.

Refuses before the upgrade, with OpenAI's envelope and a status: no key, an unknown model, too many
sessions, a page of a foreign origin. What happens on an open connection is
`router.http.realtime_connection`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster.clock import Clock
from cluster.errors import (
    OverloadedError,
    RateLimitError,
    SplitscribeError,
    UnsupportedValueError,
)
from cluster.metrics import Recorder
from cluster.settings import RouterSettings
from router.http.client_secrets import PREFIX, USUAL_S, ClientSecret, ClientSecrets
from router.http.envelope import error_response, note_error
from router.http.keys import KeyRing
from router.http.models import LIVE_ALIASES, ModelRegistry
from router.http.realtime_connection import RealtimeConnection
from router.live.events import EventWriter, Form, new_id
from router.live.interface import LiveConfig, LiveSession
from router.live.protocol import LiveProtocol
from router.live.session_config import (
    ModelNames,
    SessionConfig,
    as_beta_session,
    as_session,
    updated,
)

logger = logging.getLogger(__name__)

SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."  # a browser cannot send a header
BETA_SUBPROTOCOL = "openai-beta.realtime-v1"
NO_ROOM = (429, 503)  # statuses of a session that may come in later
RETRY_AFTER_S = 5.0
DRAIN_S = 26.0  # of all sessions; each ends before it


class OriginRefusedError(SplitscribeError):
    """A page of another site asks, and no key says that it may."""

    status = 403
    type = "invalid_request_error"
    default_code = "origin_not_allowed"
    should_retry = False


class RealtimeService:
    """All realtime sessions of one router. Used by one event loop."""

    def __init__(
        self,
        registry: ModelRegistry,
        settings: RouterSettings,
        keys: KeyRing,
        secrets: ClientSecrets,
        *,
        recorder: Recorder,
        clock: Clock,
        is_proxied: bool,
    ) -> None:
        self._registry = registry
        self._recorder = recorder
        self._settings = settings
        self._keys = keys
        self._secrets = secrets
        self._clock = clock
        self._is_proxied = is_proxied
        self._names = ModelNames(
            languages=lambda name: registry.find(name).languages,
            are_one=lambda one, other: registry.find(one) is registry.find(other),
            without_vad=LIVE_ALIASES,
        )
        self._connections: dict[RealtimeConnection, int | None] = {}  # with their keys' numbers
        self._opening: list[int | None] = []  # keys' numbers
        self._is_draining = False
        self._all_closed = asyncio.Event()
        self._all_closed.set()

    @property
    def sessions(self) -> int:
        """How many are open."""
        return len(self._connections) + len(self._opening)

    def report(self) -> None:
        """Tell the metrics how many sessions are open; called once a second."""
        self._recorder.set("splitscribe_live_sessions", self.sessions)

    async def drain(self) -> None:
        """Refuse new sessions, let the open turns of others end, and close them with 1012."""
        self._is_draining = True
        for connection in tuple(self._connections):
            connection.drain()
        try:
            async with asyncio.timeout(DRAIN_S):
                await self._all_closed.wait()
        except TimeoutError:
            logger.warning("%d realtime sessions did not end in time", self.sessions)

    # ---- sessions ----

    async def serve(self, websocket: WebSocket) -> None:
        """Answer one request for an upgrade, and serve it to its end."""
        try:
            secret = self._authorised(websocket)
            with self._place_of(secret.owner) as place:
                protocol, writer = self._begin(websocket, secret)
                await self._run(websocket, protocol, writer, place)
        except SplitscribeError as error:
            if websocket.application_state.name != "CONNECTING":
                raise
            logger.info("realtime refused: %s %s", type(error).__name__, error.code or error.type)
            note_error(websocket.scope, error)
            if error.status in NO_ROOM:
                code = error.code or error.type
                self._recorder.add("splitscribe_live_refused_total", code=code)
            await _refuse(websocket, error)

    async def _run(
        self,
        websocket: WebSocket,
        protocol: LiveProtocol,
        writer: EventWriter,
        place: _Place,
    ) -> None:
        offered = websocket.scope.get("subprotocols", [])
        try:
            await websocket.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        except (WebSocketDisconnect, RuntimeError, OSError):
            await protocol.session.close()
            return
        except asyncio.CancelledError:
            await protocol.session.close()
            raise
        connection = RealtimeConnection(
            websocket,
            protocol,
            writer,
            self._settings.live,
            self._clock,
            is_proxied=self._is_proxied,
        )
        started_s = self._clock.monotonic()
        place.take(connection)
        logger.info("realtime session %s opened", protocol.session_id)
        if self._is_draining:
            connection.drain()
        ending = await connection.run()
        logger.info(
            "realtime session %s closed after %.1f s: %s",
            protocol.session_id,
            self._clock.monotonic() - started_s,
            ending.reason or ending.code,
        )

    def _begin(
        self, websocket: WebSocket, secret: ClientSecret
    ) -> tuple[LiveProtocol, EventWriter]:
        """The session of a client that may come in.

        Raises:
            SplitscribeError: no such model, an intent that is not served, or no capacity.
        """
        query = websocket.query_params
        if (intent := query.get("intent", "transcription")) != "transcription":
            raise UnsupportedValueError(
                f"intent '{intent[:64]}' is not served here; this server transcribes",
                param="intent",
            )
        form: Form = "beta" if _is_beta(websocket) else "ga"
        writer = EventWriter(self._clock.random, form)
        config = self._first_config(query.get("model"))
        if secret.session:
            config = updated(config, secret.session, self._names)
        owner = self._keys.owner_digest(secret.owner)

        def open_session(live: LiveConfig) -> LiveSession:
            engine = self._registry.find(live.model).live
            if engine is None:
                raise UnsupportedValueError(
                    f"the model '{live.model}' has no realtime sessions here", param="model"
                )
            session_id = new_id(self._clock.random, "live")
            return engine.open(live, session_id=session_id, owner=owner)

        lifetime_s = self._settings.live.max_session_s
        return (
            LiveProtocol(
                config,
                names=self._names,
                open_session=open_session,
                writer=writer,
                expires_at=int(self._secrets.unix_time() + lifetime_s),
                is_configured=bool(secret.session),
            ),
            writer,
        )

    def _first_config(self, model: str | None) -> SessionConfig:
        """Of a session that has not been configured. Raises ModelNotFoundError."""
        name = model or self._registry.models[0].names[0]
        base = SessionConfig(live=LiveConfig(model=name))
        return updated(base, {}, self._names)

    # ---- who may come in ----

    def _authorised(self, websocket: WebSocket) -> ClientSecret:
        """Raises AuthenticationError, or OriginRefusedError."""
        key = _key_of(websocket)
        if key is not None and key.startswith(PREFIX):
            return self._secrets.read(key)
        if len(self._keys):
            sent = None if key is None else key.encode("utf-8", "surrogateescape")
            return ClientSecret(self._keys.owner(sent), {})
        self._check_origin(websocket)
        return ClientSecret(None, {})

    def _check_origin(self, websocket: WebSocket) -> None:
        """Browsers let any page open a WebSocket anywhere: CORS does not hold there."""
        origin = websocket.headers.get("origin")
        allowed = self._settings.cors_origins
        if origin is None or "*" in allowed or origin in allowed:
            return
        if urlsplit(origin).netloc != websocket.headers.get("host"):
            raise OriginRefusedError(
                "This page's origin may not open sessions here; the server's setting "
                "router.cors_origins allows it."
            )

    @contextmanager
    def _place_of(self, owner: int | None) -> Iterator[_Place]:
        """Count a session while it is open. Raises RateLimitError, or OverloadedError."""
        if self._is_draining:
            raise OverloadedError("This server restarts; please connect again.", code="overloaded")
        limits = self._settings.live
        of_key = [*self._connections.values(), *self._opening].count(owner)
        if owner is not None and limits.max_sessions_per_key:
            _check_room(of_key, limits.max_sessions_per_key, "This API key has")
        _check_room(self.sessions, limits.max_sessions, "This server has")
        self._opening.append(owner)
        self._all_closed.clear()
        place = _Place(self, owner)
        try:
            yield place
        finally:
            place.leave()
            if not self.sessions:
                self._all_closed.set()

    # ---- client secrets ----

    def create_secret(
        self, owner: int | None, session: dict[str, Any], seconds: int = USUAL_S
    ) -> dict[str, Any]:
        """The answer of `POST /v1/realtime/client_secrets`. Raises SplitscribeError."""
        config = self._checked(session)
        value, expires_at = self._secrets.issue(owner, session, seconds)
        made = as_session(config, new_id(self._clock.random, "sess"), expires_at)
        return {"value": value, "expires_at": expires_at, "session": made}

    def create_beta_session(
        self, owner: int | None, session: dict[str, Any], seconds: int = USUAL_S
    ) -> dict[str, Any]:
        """The answer of `POST /v1/realtime/transcription_sessions`. Raises SplitscribeError."""
        config = self._checked(session)
        value, expires_at = self._secrets.issue(owner, session, seconds)
        made = as_beta_session(config, new_id(self._clock.random, "sess"), expires_at)
        return {**made, "client_secret": {"value": value, "expires_at": expires_at}}

    def _checked(self, session: dict[str, Any]) -> SessionConfig:
        return updated(self._first_config(None), session, self._names)


class _Place:
    """One session among those that are counted."""

    def __init__(self, service: RealtimeService, owner: int | None) -> None:
        self._service = service
        self._owner = owner
        self._connection: RealtimeConnection | None = None

    def take(self, connection: RealtimeConnection) -> None:
        """From now on the session has a connection, which `drain` ends."""
        self._service._opening.remove(self._owner)
        self._service._connections[connection] = self._owner
        self._connection = connection

    def leave(self) -> None:
        if self._connection is None:
            self._service._opening.remove(self._owner)
        else:
            del self._service._connections[self._connection]


def _check_room(taken: int, most: int, who: str) -> None:
    if taken >= most:
        raise RateLimitError(
            f"{who} {taken} realtime sessions open, of at most {most}. Please try again when one "
            f"has ended.",
            retry_after_s=RETRY_AFTER_S,
        )


def _key_of(websocket: WebSocket) -> str | None:
    """The bearer's key, from the header or from the sub-protocols."""
    kind, _, key = websocket.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    for offered in websocket.scope.get("subprotocols", []):
        if offered.startswith(KEY_SUBPROTOCOL):
            return str(offered.removeprefix(KEY_SUBPROTOCOL))
    return None


def _is_beta(websocket: WebSocket) -> bool:
    return "realtime=v1" in websocket.headers.get(
        "openai-beta", ""
    ) or BETA_SUBPROTOCOL in websocket.scope.get("subprotocols", [])


async def _refuse(websocket: WebSocket, error: SplitscribeError) -> None:
    """Answer before the upgrade, or close at once where the server in front cannot carry that."""
    try:
        if "websocket.http.response" in websocket.scope.get("extensions", {}):
            await websocket.send_denial_response(error_response(error))
        else:
            await websocket.close(1008, str(error.code or error.type))
    except (WebSocketDisconnect, RuntimeError, OSError):
        pass  # it has gone

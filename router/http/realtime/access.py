"""Who may open a realtime session: API keys, client secrets, and allowed origins of web pages.

A key comes in a header, or among the sub-protocols, since a browser cannot set headers. How a
client is refused before the WebSocket upgrade is here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster.common.errors import SplitscribeError
from router.http.envelope import error_response
from router.http.keys import KeyRing
from router.http.realtime.client_secrets import PREFIX, ClientSecret, ClientSecrets

SUBPROTOCOL = "realtime"
KEY_SUBPROTOCOL = "openai-insecure-api-key."  # for browsers, which cannot set headers
BETA_SUBPROTOCOL = "openai-beta.realtime-v1"


class OriginRefusedError(SplitscribeError):
    """A web page of another origin connects, and the server has no keys."""

    status = 403
    type = "invalid_request_error"
    default_code = "origin_not_allowed"
    should_retry = False


class Access:
    """Checks the key or the origin of a connection."""

    def __init__(self, keys: KeyRing, secrets: ClientSecrets, cors_origins: Sequence[str]) -> None:
        self._keys = keys
        self._secrets = secrets
        self._cors_origins = cors_origins

    def authorised(self, websocket: WebSocket) -> ClientSecret:
        """The client's permission. Raises AuthenticationError or OriginRefusedError."""
        key = _key_of(websocket)
        if key is not None and key.startswith(PREFIX):
            return self._secrets.read(key)
        if len(self._keys):
            sent = None if key is None else key.encode("utf-8", "surrogateescape")
            return ClientSecret(self._keys.owner(sent), {})
        self._check_origin(websocket)
        return ClientSecret(None, {})

    def _check_origin(self, websocket: WebSocket) -> None:
        """Browsers do not apply CORS to WebSockets: any page may open one to any host."""
        origin = websocket.headers.get("origin")
        allowed = self._cors_origins
        if origin is None or "*" in allowed or origin in allowed:
            return
        if urlsplit(origin).netloc != websocket.headers.get("host"):
            raise OriginRefusedError(
                "Pages of this origin may not open sessions here. The server's operator can allow "
                "it by the setting router.cors_origins."
            )


def _key_of(websocket: WebSocket) -> str | None:
    """The API key or client secret, from the header or from the sub-protocols."""
    kind, _, key = websocket.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and key.strip():
        return key.strip()
    for offered in websocket.scope.get("subprotocols", []):
        if offered.startswith(KEY_SUBPROTOCOL):
            return str(offered.removeprefix(KEY_SUBPROTOCOL))
    return None


def is_beta(websocket: WebSocket) -> bool:
    """Whether the client expects the beta's events."""
    return "realtime=v1" in websocket.headers.get(
        "openai-beta", ""
    ) or BETA_SUBPROTOCOL in websocket.scope.get("subprotocols", [])


async def refuse(websocket: WebSocket, error: SplitscribeError) -> None:
    """Answer with an error before the upgrade, or close at once if the server cannot do that."""
    try:
        if "websocket.http.response" in websocket.scope.get("extensions", {}):
            await websocket.send_denial_response(error_response(error))
        else:
            await websocket.close(1008, str(error.code or error.type))
    except (WebSocketDisconnect, RuntimeError, OSError):
        pass  # the client has gone

"""Check the key, host, origin and body size of every request before its body is read.

Routes need no checks of their own, except that WebSockets may send client secrets as keys, which
`router.http.realtime` checks.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from cluster.common.errors import InvalidRequestError, PayloadTooLargeError, SplitscribeError
from cluster.common.settings import RouterSettings
from router.http.envelope import ASR_PATHS, error_response, note_error, notes_of
from router.http.keys import KeyRing, sent_key

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/livez", "/readyz", "/version"})  # any host name, no key
PAGE, PAGE_FILES = "/", "/page/"  # no key
METRICS = "/metrics"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # change nothing

MAX_BODY_BYTES = 262_144  # of a body that is no upload
STALL_S = 60.0  # longest silence of a client in the middle of a body
LEAST_RATE = 10_000.0  # mean bytes a second of a body, after `RATED_S`
RATED_S = 30.0


class OriginRefusedError(SplitscribeError):
    status = 403
    type = "invalid_request_error"
    default_code = "origin_not_allowed"
    should_retry = False


class HostRefusedError(SplitscribeError):
    status = 421
    type = "invalid_request_error"
    default_code = "host_not_allowed"
    should_retry = False


class Access:
    def __init__(self, keys: KeyRing, settings: RouterSettings, uploads: Mapping[str, int]) -> None:
        """uploads: the largest body, in bytes, for each prefix of paths that take uploads."""
        self._keys = keys
        self._names = HostNames(settings.hosts) if settings.hosts or not len(keys) else None
        self._cors_origins = settings.cors_origins
        self._uploads = uploads
        self._probes = PROBES | ({METRICS} if settings.metrics == "on" else set())

    def enter(self, scope: Scope, receive: Receive) -> Receive:
        """Check a request. Returns a `receive` that bounds its body. Raises SplitscribeError."""
        path = route_path(scope)
        is_http = scope["type"] == "http"
        is_page = path == PAGE or path.startswith(PAGE_FILES)
        headers = Headers(scope=scope)
        if self._names is not None and path not in self._probes:
            self._names.check(headers)
        if not len(self._keys):
            if not is_http or scope["method"] not in SAFE_METHODS:
                check_origin(headers, self._cors_origins)
        elif is_http and path not in self._probes and not is_page:
            sent = sent_key(headers, takes_password=path in ASR_PATHS)
            notes_of(scope).owner = self._keys.owner(sent)
        if not is_http:
            return receive
        limits = [most for start, most in self._uploads.items() if path.startswith(start)]
        return bounded(receive, max(limits, default=MAX_BODY_BYTES))


def route_path(scope: Scope) -> str:
    """The path that Starlette routes by: without the mount's path, which Serve's proxy adds."""
    path: str = scope["path"]
    below = path.removeprefix(scope.get("root_path", ""))
    return below if below[:1] in ("", "/") else path


class HostNames:
    """The host names that requests may use; protects from DNS rebinding, where a web page's own
    name resolves to the server's address. IP addresses need no check, as they cannot be rebound.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        """hosts: more names, '*.DOMAIN' for all below a domain, or '*' for every name."""
        own = socket.gethostname()
        names = {_name_of(host) for host in ("localhost", own, own.partition(".")[0], *hosts)}
        self._takes_all = "*" in names
        self._names = names
        self._domains = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def check(self, headers: Headers) -> None:
        """Raises HostRefusedError. The header may be missing: browsers always send it."""
        for host in headers.getlist("host"):
            name = _name_of(host)
            if not (self._takes_all or self._is_known(name)):
                raise HostRefusedError(
                    f"This server is not known as {name[:128]!a}. Its operator can add the name "
                    "to the setting router.hosts; localhost, IP addresses and the name of the "
                    "machine need no setting."
                )

    def _is_known(self, name: str) -> bool:
        if not name or name in self._names or name.endswith(self._domains):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name_of(host: str) -> str:
    """The name in a Host header, without the port and an IPv6 address's brackets."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def check_origin(headers: Headers, cors_origins: Sequence[str]) -> None:
    """Refuse pages of other sites: browsers let them send forms and open WebSockets anywhere.

    Raises OriginRefusedError.
    """
    origin, site = headers.get("origin"), headers.get("sec-fetch-site")
    if "*" in cors_origins or origin in cors_origins:
        return
    if site == "same-origin":  # the browser says so; behind a proxy, Host may not
        return
    is_foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
    if is_foreign or site == "cross-site":
        raise OriginRefusedError(
            "This server has no API keys, so web pages of other origins may not do this. Its "
            "operator can allow an origin by the setting router.cors_origins."
        )


async def refuse_upgrade(websocket: WebSocket, error: SplitscribeError) -> None:
    logger.info("WebSocket refused: %s %s", type(error).__name__, error.code or error.type)
    note_error(websocket.scope, error)
    try:
        if "websocket.http.response" in websocket.scope.get("extensions", {}):
            await websocket.send_denial_response(error_response(error))
        else:
            await websocket.close(1008, str(error.code or error.type))
    except (WebSocketDisconnect, RuntimeError, OSError):
        pass  # the client has gone


def bounded(receive: Receive, max_bytes: int) -> Receive:
    """Wrap `receive` to raise if the body is too long or too slow. The message after the body is
    the client's hang-up, which has no time limit.
    """
    time_s = asyncio.get_running_loop().time
    begun_s: float | None = None
    n_bytes, is_whole = 0, False

    async def receive_bounded() -> Message:
        nonlocal begun_s, n_bytes, is_whole
        if is_whole:
            return await receive()
        if begun_s is None:
            begun_s = time_s()
        slow_s = begun_s + RATED_S + n_bytes / LEAST_RATE
        try:
            async with asyncio.timeout_at(min(time_s() + STALL_S, slow_s)):
                message = await receive()
        except TimeoutError:
            took_s = time_s() - begun_s
            raise InvalidRequestError(
                f"the upload stalled: {n_bytes} bytes came in {took_s:.0f} s; send at least "
                f"{LEAST_RATE:.0f} a second, without pauses of {STALL_S:.0f} s",
                code="upload_stalled",
            ) from None
        n_bytes += len(message.get("body", b""))
        if n_bytes > max_bytes:
            raise PayloadTooLargeError(f"the body has more than {max_bytes} bytes")
        is_whole = not message.get("more_body", False)
        return message

    return receive_bounded

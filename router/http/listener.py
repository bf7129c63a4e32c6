"""The router's own HTTP server, without a proxy, for a cluster on one machine.

Every router replica listens on the same port, and the kernel gives each new connection to one of
them (SO_REUSEPORT). uvicorn's protocols are extended by limits on what one connection may cost.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame, Opcode

from cluster.common.errors import WorkerError

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = 90.0  # of an idle connection, as Serve's proxy has it
CLOSE_TIMEOUT_S = 30.0  # for requests in flight when the replica is stopped
PING_S = 20.0  # keeps connections through proxies and NAT alive
PONG_S = 60.0  # longer than audio may wait for room, when the client is not read
STUCK_MS = 60_000  # a client that reads nothing for so long is disconnected
BIND_S = 5.0  # longest wait for another replica to free the port
BIND_AGAIN_S = 0.25
FRAME_BYTES = 16 << 20  # lower bound of the largest WebSocket message


class HttpListener(uvicorn.Server):
    """Serve one application on one address until it is closed. Belongs to one event loop."""

    port: int
    _serving: asyncio.Task[None]
    _up: asyncio.Event

    @classmethod
    async def open(
        cls, app: ASGIApp, host: str, port: int, max_message_bytes: int = 0
    ) -> HttpListener:
        """Listen. Port 0 takes a free one. Messages of WebSockets up to `max_message_bytes` reach
        the application; those above both 16 MiB and twice that close the connection.

        Raises OSError if the address cannot be bound, and WorkerError if `app` does not start.
        """
        bound = await _bound(host, port)
        config = uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_keep_alive=round(KEEP_ALIVE_S),
            timeout_graceful_shutdown=round(CLOSE_TIMEOUT_S),
            http=HttpProtocol,
            ws=WebSocketProtocol,
            ws_max_size=max(FRAME_BYTES, 2 * max_message_bytes),
            ws_ping_interval=PING_S,
            ws_ping_timeout=PONG_S,
            ws_per_message_deflate=False,  # what is sent is small, and base64 hardly shrinks
        )
        listener = cls(config)
        listener.port = bound.getsockname()[1]
        listener._up = asyncio.Event()
        listener._serving = asyncio.create_task(listener.serve(sockets=[bound]))
        up = asyncio.create_task(listener._up.wait())
        await asyncio.wait({listener._serving, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if listener._serving.done():
            bound.close()
            await listener._serving
        return listener

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # would end the whole process
            raise WorkerError("the application did not start; the log says why") from None
        self._up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that this server is part of."""
        yield

    def check(self) -> None:
        """Raises WorkerError if nothing listens any more."""
        if self._serving.done():
            raise WorkerError("the router's HTTP server has ended")

    async def close(self) -> None:
        """Accept no more connections, and finish the requests in flight within a time limit."""
        self.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)


async def _bound(host: str, port: int) -> socket.socket:
    """Listen, after at most `BIND_S` if the address is in use: under load, a replica that is being
    replaced may hold the shared port for a moment. Raises OSError.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + BIND_S
    while True:
        bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            # Connections of a killed replica may still be in TIME_WAIT.
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; connections inherit it
                bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, STUCK_MS)
            bound.bind((host, port))
            bound.listen(BACKLOG)
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE or loop.time() >= end_s:
                raise
            logger.warning("port %d is taken: %s; trying again", port, error)
        else:
            return bound
        await asyncio.sleep(BIND_AGAIN_S)


# ---- limits on a connection

MAX_HEAD_BYTES = 65_536
HEAD_S = 30.0  # in which a head must be complete, the first one of a connection included
MAX_WAITING = 8  # pipelined requests of a connection behind the one that is answered
SMALL_BYTES = 64  # pieces of a body below this are counted
SMALL_PER_S, SMALL_AT_ONCE = 1000.0, 5000.0  # small pieces of one connection
LINGER_S = 5.0  # in which a client that was refused may read the reason
POLICY_VIOLATION = 1008  # RFC 6455
FRAMES_PER_S, FRAMES_AT_ONCE = 1000.0, 2500.0  # of one WebSocket, fragments too: 30 ms of work
CONTROLS_PER_S, CONTROLS_AT_ONCE = 10.0, 100.0  # pings, pongs and closes among them
_PIECE_BYTES = 16_384  # of HTTP, parsed at once
_FRAMES_BYTES = 8_192  # of a WebSocket, parsed at once: 1,365 empty frames


class Budget:
    """A token bucket that may be overdrawn. `per_s` tokens are added a second, up to `burst`."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._left = burst
        self._at_s: float | None = None  # of the last spending

    def spend(self, amount: float, now_s: float) -> float:
        """Take `amount`. Returns the seconds until the budget covers it, 0.0 if it does."""
        earned = 0.0 if self._at_s is None else (now_s - self._at_s) * self._per_s
        self._left = min(self._left + earned, self._burst) - amount
        self._at_s = now_s
        return max(0.0, -self._left / self._per_s)


class HttpProtocol(HttpToolsProtocol):
    """Limit the bytes and seconds of a head, small pieces, and pipelined requests.

    What a client sends after a refusal is read and dropped until it has read the reason.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _barren_bytes = 0  # read since the last end of a head or message, or piece of a body
    _in_head = False
    _in_message = False
    _is_refused = False
    _n_small = 0  # small pieces of a body that are not counted yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._small = Budget(SMALL_PER_S, SMALL_AT_ONCE)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            if self._is_refused or self.transport.is_closing():
                return
            piece = data[start : start + _PIECE_BYTES]
            self._barren_bytes += len(piece)
            super().data_received(piece)
            if self._barren_bytes >= MAX_HEAD_BYTES:  # also in a chunk's head or in trailers
                self._refuse(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes")
            if self._n_small and self._small.spend(self._n_small, self.loop.time()):
                self._refuse(400, "its body comes in too small chunks")
            self._n_small = 0
        may_ask = not (self._is_refused or self._in_message)
        if may_ask and self.timeout_keep_alive_task is None and self._is_idle:
            self._await_head()  # the client sent empty lines

    def on_message_begin(self) -> None:
        self._in_head = self._in_message = True
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._barren_bytes = 0
        self._forget_head()
        if len(self.pipeline) >= MAX_WAITING:
            self._refuse(503, "too many requests wait on this connection")
        self._in_head = False
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._barren_bytes = 0
        self._n_small += len(body) < SMALL_BYTES
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._barren_bytes = 0
        self._in_message = False
        self._forget_head()
        if not self._is_refused:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and not self._in_head:
            self._await_head()  # also the time limit for the rest of a body that nobody reads

    def handle_websocket_upgrade(self) -> None:
        if not self._is_refused:
            super().handle_websocket_upgrade()
            self._is_refused = True  # the other protocol reads the rest
            self.parser = None  # type: ignore[assignment]  # breaks a reference cycle

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._end_wait)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_wait(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if not self._is_idle:
            self._await_head()
        elif self._in_head:
            self._refuse(408, f"the request's head was not whole after {HEAD_S:.0f} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, why: str) -> None:
        """Read nothing more, answer the earlier requests, then end the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        logger.info("the rest of a connection is refused: %d, %s", status, why)
        if self._in_message and not self._in_head:
            self.transport.abort()  # the body cannot be completed
            return
        if not self._is_idle:
            self.cycle.keep_alive = False  # the newest one
            return
        if self._in_head:
            text = why.encode()
            head = b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(text) + text)
        _end(self.loop, self.transport)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Parse no more messages than the application takes, and disconnect clients that flood it.

    Control frames and fragments, which the application never sees, are limited in their rate.
    """

    _unparsed = b""  # received while messages waited
    _is_cut = False

    def data_received(self, data: bytes) -> None:
        if not self._is_cut:
            self._unparsed += data
            self._parse()

    def _parse(self) -> None:
        """Parse received bytes until a message waits for the application."""
        data, at = self._unparsed, 0
        while at < len(data) and not (self.read_paused or self._is_cut):
            super().data_received(data[at : at + _FRAMES_BYTES])
            at += _FRAMES_BYTES
            if self.transport.is_closing():
                at = len(data)
        self._unparsed = data[at:]

    async def receive(self) -> ASGIReceiveEvent:
        message = await super().receive()
        self._parse()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.close_sent:
            self.handshake_complete = True  # after a refusal too, or uvicorn logs an error
            self._parse()  # the client's close may have come already

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._frames = Budget(FRAMES_PER_S, FRAMES_AT_ONCE)
        self._controls = Budget(CONTROLS_PER_S, CONTROLS_AT_ONCE)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Both free messages, whole or in part, that would stay until Python collects cycles.
        self.conn.receive_eof()
        if self.conn.parser_exc is not None:
            self.conn.parser_exc.__traceback__ = None

    def handle_events(self) -> None:
        frames = [event for event in self.conn.events if isinstance(event, Frame)]
        controls = sum(frame.opcode >= Opcode.CLOSE for frame in frames)
        now_s = self.loop.time()
        if self._controls.spend(controls, now_s):
            self._cut("too many pings or pongs")
        elif self._frames.spend(len(frames), now_s):
            self._cut("too many frames")
        else:
            super().handle_events()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # drops the pong, since the client reads nothing

    def _cut(self, why: str) -> None:
        logger.info("a WebSocket is cut: %s", why)
        self._is_cut = self.disconnected = True
        self.stop_keepalive()
        self.conn.fail(POLICY_VIOLATION, why)
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": POLICY_VIOLATION})
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self.writable.set()  # wakes senders
        self.close_timer = _end(self.loop, self.transport)


def _end(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> asyncio.TimerHandle:
    """Close for writing, and abort after `LINGER_S`. The caller must keep reading, since closing a
    socket with unread bytes drops what was sent last.
    """
    if transport.can_write_eof():
        transport.write_eof()
    return loop.call_later(LINGER_S, transport.abort)

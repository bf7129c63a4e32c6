"""The router's own HTTP server, so that no proxy stands between it and its clients.

For a cluster on one machine: every router replica listens on the same port, and the kernel hands
each new connection to one of them (SO_REUSEPORT). A cluster of several machines needs something
in front of its routers, and Ray Serve's proxies are that. Knows uvicorn and sockets, not what is
served.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

import uvicorn
from starlette.types import ASGIApp

from cluster.common.errors import WorkerError
from router.http.protocols import HttpProtocol, WebSocketProtocol

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted
KEEP_ALIVE_S = 90.0  # of an idle connection, as Serve's proxy has it
CLOSE_TIMEOUT_S = 30.0  # for requests in flight when the replica is stopped
PING_S = 20.0  # keeps what stands between awake; an answer may take as long as audio waits for room
PONG_S = 60.0
BIND_S = 5.0  # in which a port that another replica is about to leave becomes free
BIND_AGAIN_S = 0.25
FRAME_BYTES = 16 << 20  # of a WebSocket message, at least


class HttpListener:
    """Serves one application on one address until it is closed. Belongs to one event loop."""

    def __init__(self, server: uvicorn.Server, serving: asyncio.Task[None], port: int) -> None:
        self.port = port
        self._server = server
        self._serving = serving

    @classmethod
    async def open(
        cls, app: ASGIApp, host: str, port: int, max_message_bytes: int = 0
    ) -> HttpListener:
        """Listen; port 0 takes a free one. A port that is taken is tried again for 5 s.

        Args:
            max_message_bytes: that the application wants to see of a WebSocket's message; one of
                more than 16 MiB and more than this closes the connection.

        Raises:
            OSError: the address cannot be bound.
            WorkerError: the application does not start.
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
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        up = asyncio.create_task(server.up.wait())
        await asyncio.wait({serving, up}, return_when=asyncio.FIRST_COMPLETED)
        up.cancel()
        if serving.done():
            bound.close()
            await serving
        return cls(server, serving, bound.getsockname()[1])

    def check(self) -> None:
        """Raise WorkerError when nothing listens any more."""
        if self._serving.done():
            raise WorkerError("the router's HTTP server has ended")

    async def close(self) -> None:
        """Take no new connection, finish the requests in flight, cut what takes too long."""
        self._server.should_exit = True
        await asyncio.gather(self._serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """Tells when it is up."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # which would end the whole process
            raise WorkerError("the application did not start; the log says why") from None
        self.up.set()


async def _bound(host: str, port: int) -> socket.socket:
    """A listening socket, once the address is free.

    A replica that was replaced under load was seen to hold its port for a moment, though it
    shared it.

    Raises:
        OSError: the address cannot be bound, or is still taken after 5 s.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + BIND_S
    while True:
        try:
            return _bind(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or loop.time() >= end_s:
                raise
            logger.warning("port %d is taken: %s; trying again", port, error)
        await asyncio.sleep(BIND_AGAIN_S)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A replica that takes the place of a killed one finds its connections in TIME_WAIT.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError:
        bound.close()
        raise
    return bound

"""A host of somebody else's, in a thread: it answers as a test says, and notes what came."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Came:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    tells_length: bool = True


@dataclass
class Host:
    port: int
    came: list[Came]
    released: threading.Event  # set: answers that wait are given

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextmanager
def http_host(
    answer: Callable[[Came, Host], Answer], tls: ssl.SSLContext | None = None
) -> Iterator[Host]:

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            came = Came(self.command, self.path, headers, self.rfile.read(length))
            host.came.append(came)
            given = answer(came, host)
            self.send_response(given.status)
            if given.tells_length:
                self.send_header("content-length", str(len(given.body)))
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(given.body)

        do_POST = do_HEAD = do_GET  # noqa: N815 - as that class has it

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients hang up
    host = Host(server.server_address[1], [], threading.Event())
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield host
    finally:
        host.released.set()
        server.shutdown()
        server.server_close()
        thread.join(10)

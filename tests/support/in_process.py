"""The whole server in this process: real HTTP, real audio workers, real engines, no Ray.

For tests that send hundreds of requests or need limits of their own: it starts in a second, and
a bug in it is a traceback here. KV moves in memory; `conftest.server` has the real transport.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import uvicorn

from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.in_process import live_engine_over, local_engines, transcriber_over
from cluster.serve.model_parts import served_model
from router.http.models import ModelRegistry
from router.http.routes import create_app

START_S = 60.0
STOP_S = 30.0


@contextmanager
def in_process_server(others: Mapping[str, Any] | None = None, **router: Any) -> Iterator[str]:
    """Serve the bundled model with these settings of the router and `others`. Yields the URL."""
    flags = {**(others or {}), "router": {"audio_workers": 1, **router}}
    settings = load_settings(None, flags, environ={})
    started: Future[uvicorn.Server] = Future()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=_run, args=(settings, listening, started), daemon=True)
        thread.start()
        server = started.result(START_S)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(STOP_S)
            assert not thread.is_alive(), "the server did not end"


def _run(settings: Settings, listening: socket.socket, started: Future[uvicorn.Server]) -> None:
    try:
        asyncio.run(_serve(settings, listening, started))
    except BaseException as error:
        if started.done():
            raise
        started.set_exception(error)


async def _serve(
    settings: Settings, listening: socket.socket, started: Future[uvicorn.Server]
) -> None:
    """Serve until `should_exit`; clients may connect before, they wait in the socket's queue."""
    name, own = next(iter(settings.by_model().items()))
    async with (
        local_engines(own) as engines,
        transcriber_over(engines) as transcriber,
        live_engine_over(engines) as live,
    ):
        registry = ModelRegistry([served_model(settings, name, transcriber, live)])
        app = create_app(registry, settings.router)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        started.set_result(server)
        await server.serve(sockets=[listening])

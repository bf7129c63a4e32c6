"""The whole server in this process: real HTTP, real audio workers, real engines, no Ray.

For tests that send hundreds of requests or need limits of their own: it starts in a second, and
a bug in it is a traceback here. KV moves in memory; `conftest.server` has the real transport.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from anyio.from_thread import start_blocking_portal

from cluster.common.model.tensor_files import BUNDLED_FOLDER
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.in_process import live_engine_over, local_engines, transcriber_over
from cluster.serve.model_parts import served_model
from router.http.models import ModelRegistry
from router.http.routes import create_app

STOP_S = 30.0


def translating_model(folder: Path) -> str:
    """A copy of the bundled model in `folder`, which says nothing of having one language."""
    copy = folder / "demo"
    shutil.copytree(BUNDLED_FOLDER, copy)
    file = copy / "generation_config.json"
    config = json.loads(file.read_text())
    del config["languages"]
    file.write_text(json.dumps(config))
    return str(copy)


@contextmanager
def in_process_server(others: Mapping[str, Any] | None = None, **router: Any) -> Iterator[str]:
    """Serve the bundled model with these settings of the router and `others`. Yields the URL."""
    flags = {**(others or {}), "router": {"audio_workers": 1, **router}}
    settings = load_settings(None, flags, environ={})
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_serving(settings, listening)),
    ):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@asynccontextmanager
async def _serving(settings: Settings, listening: socket.socket) -> AsyncIterator[None]:
    """Serve while it is entered; clients may connect before, they wait in the socket's queue."""
    name, own = next(iter(settings.by_model().items()))
    async with (
        local_engines(own) as engines,
        transcriber_over(engines) as transcriber,
        live_engine_over(engines) as live,
    ):
        registry = ModelRegistry([served_model(settings, name, transcriber, live)])
        app = create_app(registry, settings.router)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield
        finally:
            server.should_exit = True
            async with asyncio.timeout(STOP_S):
                await serving

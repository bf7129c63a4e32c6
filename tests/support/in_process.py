"""The whole server in this process, without Ray: real HTTP, audio workers, engines."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from cluster.common.model.tensor_files import BUNDLED_FOLDER
from cluster.common.settings import Settings
from cluster.common.settings_sources import load_settings
from cluster.serve.bulk.engine import BulkEngine
from cluster.serve.in_process import listening, local_registry
from router.batches.service import open_service
from router.http.batches import BatchAccess
from router.http.routes import create_app


def translating_model(folder: Path) -> str:
    copy = folder / "demo"
    shutil.copytree(BUNDLED_FOLDER, copy)
    file = copy / "generation_config.json"
    config = json.loads(file.read_text())
    del config["languages"]
    file.write_text(json.dumps(config))
    return str(copy)


@contextmanager
def in_process_server(others: Mapping[str, Any] | None = None, **router: Any) -> Iterator[str]:
    flags = {**(others or {}), "router": {"audio_workers": 1, **router}}
    settings = load_settings(None, flags, environ={})
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_serving(settings)) as url,
    ):
        yield url


@asynccontextmanager
async def _serving(settings: Settings) -> AsyncIterator[str]:
    async with local_registry(settings) as registry, AsyncExitStack() as closed:
        access = None
        if settings.batches.folder is not None:
            service = await open_service(settings.batches, BulkEngine(registry))
            closed.push_async_callback(service.close)
            access = BatchAccess(service, settings.batches.max_file_bytes)
        app = create_app(registry, settings.router, batches=access)
        yield await closed.enter_async_context(listening(app, settings))

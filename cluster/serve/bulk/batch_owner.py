"""The one Serve replica that owns the files and batches and their folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from cluster.common.errors import WorkerError
from cluster.common.metrics import BATCH_METRICS, ROUTER_METRICS
from cluster.common.settings import Settings
from cluster.serve.bulk.engine import BulkEngine
from cluster.serve.replicas.replica_setup import start_replica
from cluster.serve.serve_pool import pools_of
from router.batches.service import ASKED, BatchService, open_service

logger = logging.getLogger(__name__)


class BatchOwner:
    _service: BatchService

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: Settings,
        build: str,
        encoders: Mapping[str, Any],
        decoders: Mapping[str, Any],
    ) -> None:
        self._opened = AsyncExitStack()  # closed by `__del__`, also if a later step here fails
        _, recorder = start_replica("batches", settings, build, (*ROUTER_METRICS, *BATCH_METRICS))
        own = settings.batches
        engine = await self._opened.enter_async_context(
            BulkEngine.over_pools(
                settings,
                pools_of(encoders, decoders),
                recorder=recorder,
                max_upload_bytes=own.max_file_bytes,
                audio_workers=own.audio_workers,
            )
        )
        self._service = await open_service(own, engine, recorder)
        self._opened.push_async_callback(self._service.close)
        logger.info("files and batches are kept in %s", own.folder)

    async def call(self, method: str, *values: Any) -> Any:
        assert method in ASKED
        return await getattr(self._service, method)(*values)

    def check_health(self) -> None:
        if not self._service.healthy():
            raise WorkerError("the owner of batches no longer runs them")

    async def __del__(self) -> None:
        await self._opened.aclose()

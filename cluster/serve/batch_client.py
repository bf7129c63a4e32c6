"""A router's client of the batch owner, through Ray Serve.

Calls are idempotent, and are repeated while a dead owner is replaced.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from cluster.common.errors import OverloadedError, WorkerGoneError
from cluster.serve.serve_pool import call_worker
from router.batches.service import ASKED, BatchService

PATIENCE_S = 20.0  # an owner that died is replaced within seconds
PAUSE_S = 0.5
ANSWER_S = 60.0  # longest wait for one answer


def batches_behind(handle: Any) -> BatchService:
    # Made once, as it costs as much as a small call.
    bound = handle.options(method_name="call", request_serialization="pickle")

    async def call(method: str, *values: Any) -> Any:
        """Raises OverloadedError: no answer within `PATIENCE_S`."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await call_worker(bound.remote(method, *values))
            except (WorkerGoneError, TimeoutError) as error:
                if time.monotonic() >= deadline_s:
                    raise OverloadedError(
                        "Files and batches cannot be reached now. Please try again shortly.",
                        retry_after_s=5.0,
                    ) from error
            await asyncio.sleep(PAUSE_S)

    asked = {method: partial(call, method) for method in ASKED}
    return cast(BatchService, SimpleNamespace(**asked))

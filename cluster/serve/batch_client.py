"""How a router reaches the one process that owns files and batches, through Ray Serve.

Where the owner has just ended, a call is repeated until the next one answers: each does no harm
when it comes twice.
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
    # Made once: it costs as much as a small call.
    bound = handle.options(method_name="call", request_serialization="pickle")

    async def call(method: str, *values: Any) -> Any:
        """Raises OverloadedError where nobody answered for a while."""
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

"""A router's way to the owner of batches, over a handle that the test plays."""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from cluster.common.errors import NotFoundError, OverloadedError
from cluster.serve import batch_client
from cluster.serve.batch_client import batches_behind
from cluster.serve.bulk.batch_owner import BatchOwner
from router.api.batch_bodies import UploadFields
from router.batches.service import ASKED, BatchService
from tests.support.batches import desk


class Handle:
    def __init__(self, service: BatchService, absent: int = 0) -> None:
        self._owner: Any = SimpleNamespace(_service=service)
        self.absent = absent

    def options(self, **options: Any) -> Handle:
        return self

    def remote(self, method: str, *values: Any) -> Any:
        async def answer() -> Any:
            if self.absent:
                self.absent -= 1
                raise RayActorError
            return await BatchOwner.call(self._owner, method, *values)

        return asyncio.ensure_future(answer())


async def test_an_owner_that_is_being_replaced_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_client, "PAUSE_S", 0.0)
    async with desk(tmp_path) as at:
        handle = Handle(at.service, absent=3)
        batches = batches_behind(handle)
        await batches.begin_upload("", "file-1", 4)
        await batches.append("", "file-1", 0, b"RIFF")
        handle.absent = 2
        stored = await batches.finish_upload("", "file-1", "a", 4, UploadFields(purpose="batch"))
        assert stored == await at.service.file("", "file-1")
        assert await batches.read("file-1", 1) == b"IFF"
        with pytest.raises(NotFoundError):
            await batches.file("other", "file-1")


async def test_where_nobody_comes_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_client, "PATIENCE_S", 0.0)
    async with desk(tmp_path) as at:
        batches = batches_behind(Handle(at.service, absent=100))
        with pytest.raises(OverloadedError, match="try again"):
            await batches.file("", "file-1")


def test_routers_have_the_methods_that_they_may_ask_and_no_others() -> None:
    behind = batches_behind(Handle(cast(BatchService, None)))
    for name in ASKED:
        assert inspect.iscoroutinefunction(getattr(BatchService, name))
        assert callable(getattr(behind, name))
    assert not hasattr(behind, "close")

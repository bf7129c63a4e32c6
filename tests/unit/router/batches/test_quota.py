"""The quota of a key's files, and of uploads on their way to be one."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from cluster.common.errors import InsufficientStorageError
from router.api.batch_bodies import UploadFields
from router.batches.blobs import ABANDONED_S
from tests.support.batches import Hands, desk, served


async def test_a_keys_quota_is_kept(tmp_path: Path) -> None:
    async with desk(tmp_path, quota_bytes=1000) as at, served(at) as server:
        client = server.client()
        first = await client.files.create(file=("a", b"x" * 600), purpose="user_data")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=("a", b"x" * 600), purpose="user_data")
        assert (refused.value.status_code, refused.value.code) == (507, "storage_quota_exceeded")
        await client.files.delete(first.id)
        await client.files.create(file=("a", b"x" * 600), purpose="user_data")


async def test_uploads_on_their_way_count(tmp_path: Path) -> None:
    """By what was announced, by what has come, and until they are over."""
    hands, fields = Hands(), UploadFields(purpose="user_data")
    async with desk(tmp_path, hands=hands, quota_bytes=1000) as at:
        service = at.service
        await service.begin_upload("aa", "file-a", 600)
        for _ in range(2):
            await service.begin_upload("aa", "file-b", 0)
            await service.append("aa", "file-b", 0, b"x" * 400)
        begun = service.begin_upload("aa", "file-c", 1)
        for more in (begun, service.append("aa", "file-b", 400, b"x")):
            with pytest.raises(InsufficientStorageError, match="uploads that run included"):
                await more
        await service.begin_upload("bb", "file-d", 1000)
        await service.append("aa", "file-a", 0, b"x" * 500)
        await service.finish_upload("aa", "file-a", "a", 500, fields)
        with pytest.raises(InsufficientStorageError):
            await service.begin_upload("aa", "file-c", 101)
        await service.begin_upload("aa", "file-c", 100)
        await service.abort_upload("file-c")
        hands.pass_s(ABANDONED_S + 1)
        await service.clean()
        await service.begin_upload("aa", "file-c", 500)

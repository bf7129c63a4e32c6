"""A disk that is really full: a 507, a batch that waits, and whole results once there is room.

The disk is a small file system in memory, which only root may mount; else the tests are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from cluster.common.errors import InsufficientStorageError
from router.batches import runner, store
from tests.support.batches import desk, outcome, served, talks
from tests.support.router_fakes import FakeTranscriber

pytestmark = pytest.mark.slow

DISK_BYTES = 4 * 2**20
WORDS = 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder that holds DISK_BYTES."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    options = ("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(tmp_path))
    if subprocess.run(("mount", *options), capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        yield tmp_path
    finally:
        subprocess.run(("umount", "--lazy", str(tmp_path)), check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    assert shutil.disk_usage(disk).free == 0
    return ballast


async def test_an_upload_that_does_not_fit_is_a_507_and_leaves_nothing(disk: Path) -> None:
    async with desk(disk / "kept") as at, served(at) as server:
        client = server.client()
        kept = await client.files.create(file=("a", b"x" * 10_000), purpose="user_data")
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=("b", b"x" * DISK_BYTES), purpose="user_data")
        assert refused.value.status_code == 507
        assert list((disk / "kept/uploads").iterdir()) == []
        ballast = fill(disk)
        for content in (b"x" * 10_000, b"x"):
            with pytest.raises(openai.APIStatusError) as refused:
                await client.files.create(file=("c", content), purpose="user_data")
            assert refused.value.status_code == 507
        assert (await client.files.content(kept.id)).content == b"x" * 10_000
        ballast.unlink()
        await client.files.create(file=("c", b"x" * 10_000), purpose="user_data")
        assert len((await client.files.list()).data) == 2


async def test_a_batch_waits_for_room_and_its_results_are_whole(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full while lines run, and again while the results' files are written."""
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    monkeypatch.setattr(runner, "ROOM_S", 0.05)
    monkeypatch.setattr(store, "MAX_READERS", 1000)
    transcriber = FakeTranscriber()
    transcriber.texts = (" word" * WORDS,)  # 100 kB, several times in a verbose answer
    async with desk(disk / "kept", transcriber, concurrency=1) as at:
        input_id = await at.upload(talks(3, response_format="verbose_json"))
        ballast = fill(disk)
        with pytest.raises(InsufficientStorageError, match="disk for files and batches is full"):
            [await at.create(input_id) for _ in range(1000)]  # the database's file has some room
        created = (await at.service.list_batches("", None, 1000)).data
        ballast.unlink()
        batch_id = await at.create(input_id)
        await at.until(batch_id, lambda batch: batch.request_counts.completed >= 1)
        ballast = fill(disk)
        batch = await at.until(batch_id, lambda batch: batch.paused is not None)
        assert "full" in str(batch.paused)
        ballast.unlink()
        for one in (*(batch.id for batch in created), batch_id):
            batch = await at.ended(one)
            assert (outcome(batch), batch.paused) == (("completed", 3, 0), None)
        results = await at.content(batch.output_file_id)
        assert [one["custom_id"] for one in results] == ["l0", "l1", "l2"]
        assert {one["response"]["body"]["text"].count("word") for one in results} == {WORDS}

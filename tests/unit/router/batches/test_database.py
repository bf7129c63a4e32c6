"""The folder of files and batches: one owner, a local disk, everything or nothing."""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cluster.common.errors import ConfigurationError, InsufficientStorageError
from router.api.batch_bodies import CreateBatchRequest, FileObject
from router.batches.blobs import ABANDONED_S, Blobs
from router.batches.database import VERSION, Database, disk_full
from router.batches.store import Store
from tests.support.batches import AUDIO, ENDPOINT, desk, line


async def test_a_network_file_system_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind a link; and nothing is left there."""
    shared, link = tmp_path / "shared", tmp_path / "link"
    (shared / "local disk").mkdir(parents=True)
    link.symlink_to(shared)
    mounts = [
        SimpleNamespace(mountpoint=str(point), fstype=sort)
        for point, sort in ((shared, "nfs4"), (shared / "local disk", "xfs"), ("/", "ext4"))
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    with pytest.raises(ConfigurationError, match="nfs4, a network file system"):
        async with desk(link / "kept"):
            pass
    assert not list((shared / "kept").iterdir())
    for local in (tmp_path / "kept", link / "local disk/kept"):
        async with desk(local):
            pass


@pytest.mark.parametrize("has_other_files", [False, True])
async def test_nobody_else_reads_what_is_kept(tmp_path: Path, has_other_files: bool) -> None:
    """Whatever the umask, also of what an older version wrote."""
    folder = tmp_path / "kept"
    before = os.umask(0)
    try:
        folder.mkdir()
        Database(folder).close()
        (folder / "batches.sqlite").chmod(0o644)
        if has_other_files:
            (folder / "lost+found").touch()
        async with desk(folder) as at:
            await at.run(line("a", **AUDIO))
            modes = {one.name: one.stat().st_mode & 0o777 for one in folder.iterdir()}
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == (0o777 if has_other_files else 0o700)
    modes.pop("lost+found", None)
    assert {name: mode for name, mode in modes.items() if "." in name} == dict.fromkeys(
        ("batches.sqlite", "batches.sqlite-wal"), 0o600
    )
    assert {mode for name, mode in modes.items() if "." not in name} == {0o700}


async def test_a_second_service_on_the_folder_is_refused(tmp_path: Path) -> None:
    async with desk(tmp_path):
        with pytest.raises(ConfigurationError, match="another process"):
            async with desk(tmp_path, options={"owned_s": 0.0}):
                pass
    async with desk(tmp_path):
        pass


async def test_a_damaged_database_is_told_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "batches.sqlite").write_bytes(b"damaged" * 1000)
    with pytest.raises(ConfigurationError, match=f"{tmp_path} cannot be used: file is not a"):
        async with desk(tmp_path):
            pass


@pytest.mark.parametrize(("version", "age"), [(VERSION + 1, "newer"), (VERSION - 1, "older")])
def test_what_another_version_wrote_is_left_alone(tmp_path: Path, version: int, age: str) -> None:
    Database(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as connection, connection:
        connection.execute(f"PRAGMA user_version = {version}")
    with pytest.raises(ConfigurationError, match=f"{age} version"):
        Database(tmp_path)


async def test_a_full_disk_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    database = Database(tmp_path)

    def fill() -> None:
        (pages,) = database.run("PRAGMA page_count").fetchone()
        database.run(f"PRAGMA max_page_count = {pages}")
        for i in range(1000):
            database.run(
                "INSERT INTO lines (batch_id, number, custom_id, offset, length)"
                " VALUES ('b', ?, ?, 0, 0)",
                i,
                "x" * 1000,
            )

    with pytest.raises(InsufficientStorageError):
        await database.call(fill)
    assert database.run("SELECT count(*) FROM lines").fetchone() == (0,)
    database.close()


async def test_an_upload_that_the_database_has_no_room_for_leaves_no_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as at:

        def add(owner: str, file: FileObject) -> FileObject:
            raise disk_full()

        monkeypatch.setattr(at.service._store, "add_file", add)
        with pytest.raises(InsufficientStorageError):
            await at.upload(b"content")
        assert not [*(tmp_path / "uploads").iterdir(), *(tmp_path / "files").iterdir()]


def test_a_batch_that_was_cancelled_with_its_last_line_ends_as_cancelled(tmp_path: Path) -> None:
    database = Database(tmp_path)
    store = Store(database, lambda: 1.0)
    store.add_file("", store.new_file("file-a", "batch", "a", 1, None))
    asked = CreateBatchRequest(input_file_id="file-a", endpoint=ENDPOINT, completion_window="24h")
    store.add_batch("", "batch_a", asked, 1)
    store.begin("batch_a", [], None)
    store.cancel("", "batch_a")
    store.wind_up("batch_a", "completed")
    [batch] = store.open_batches()
    assert (batch.status, batch.ends_as) == ("cancelling", "cancelled")
    database.close()


def test_an_upload_that_no_disk_has_room_for_in_the_end_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems find room only when they are asked to write."""

    def sync(path: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("router.batches.blobs._sync", sync)
    blobs = Blobs(tmp_path)
    blobs.append("file-a", 0, b"01")
    with pytest.raises(InsufficientStorageError):
        blobs.keep("file-a", 2)


def test_what_was_given_up_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = Blobs(tmp_path)
    blobs.append("file-a", 0, b"0")
    blobs.write("file-b", [b"1"])
    blobs.write("file-c", [b"1"])
    blobs.sweep({"file-b"})
    assert blobs.path("file-c").exists(), "its row may be about to be written"
    assert list((tmp_path / "uploads").iterdir())
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ABANDONED_S + 1)
    blobs.sweep({"file-b"})
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["file-b"]
    assert not list((tmp_path / "uploads").iterdir())


def test_a_result_file_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    blobs = Blobs(tmp_path, min_free_bytes=2**62)
    with pytest.raises(InsufficientStorageError):
        blobs.write("file-a", [b"1"] * 1000)
    assert not [*(tmp_path / "uploads").iterdir(), *(tmp_path / "files").iterdir()]

"""The SQLite file of files, batches and lines: its schema, its one thread, its one owner.

Everything is called in one thread (`DatabaseThread`), in transactions that are on the disk when
they return. SQLite's locks do not hold on network file systems, so these are refused; a lock on the
folder keeps a second owner out.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil

from cluster.common.errors import ConfigurationError, InsufficientStorageError

FILE_NAME = "batches.sqlite"
VERSION = 2
# File systems of which several machines may see different states.
NETWORKED = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("orangefs", "pvfs2", "smb3", "smbfs"),
    *("fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.dfuse"),
    *("fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs"),
    *("fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
)
SCHEMA = """
CREATE TABLE owners (epoch INTEGER PRIMARY KEY AUTOINCREMENT, pid INTEGER NOT NULL);
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    deleted INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX files_by_owner ON files (owner, deleted, seq);
CREATE INDEX files_by_expiry ON files (deleted, expires_at);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    status TEXT NOT NULL,
    ends_as TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    metadata TEXT,
    model TEXT,
    output_expires_after_s INTEGER,
    output_file_id TEXT,
    error_file_id TEXT,
    errors TEXT NOT NULL DEFAULT '[]',
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    times TEXT NOT NULL DEFAULT '{}',
    webhook_url TEXT,
    checks INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX batches_by_owner ON batches (owner, seq);
CREATE INDEX batches_by_status ON batches (status, seq);
CREATE TABLE lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    offset INTEGER NOT NULL,
    length INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting',
    epoch INTEGER,
    attempts INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    UNIQUE (batch_id, number)
);
CREATE INDEX lines_by_state ON lines (batch_id, state, number);
CREATE TABLE webhooks (
    id TEXT PRIMARY KEY,
    batch_id TEXT NOT NULL,
    url TEXT NOT NULL,
    type TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at INTEGER NOT NULL
);
"""
USAGE = """
CREATE TABLE IF NOT EXISTS usage (
    owner TEXT NOT NULL,
    day INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    audio_s REAL NOT NULL,
    PRIMARY KEY (owner, day)
)
"""

Result = TypeVar("Result")


def new_id(kind: str) -> str:
    """An id that nobody guesses, such as `file-` with 24 hexadecimal digits."""
    return f"{kind}{secrets.token_hex(12)}"


class Database:
    def __init__(self, folder: Path) -> None:
        """`epoch` tells the claims of this owner from those before it. Raises ConfigurationError: a
        newer version of splitscribe wrote it.
        """
        make_private(folder / FILE_NAME)  # SQLite gives the files beside it the same mode
        self._connection = sqlite3.connect(folder / FILE_NAME, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        (version,) = self.one("PRAGMA user_version")
        if version > VERSION:
            raise ConfigurationError(
                f"{folder / FILE_NAME} was written by a newer version of splitscribe"
            )
        if version == 0:
            self._connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._connection.executescript(
                f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
            )
        if version == 1:
            self._connection.executescript(
                "BEGIN; ALTER TABLE batches ADD COLUMN checks INTEGER NOT NULL DEFAULT 0;"
                f" PRAGMA user_version = {VERSION}; COMMIT;"
            )
        self._connection.execute(USAGE)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")  # also after the power was lost
        with self.transaction():
            started = self.run("INSERT INTO owners (pid) VALUES (?)", os.getpid())
        self.epoch = int(started.lastrowid or 0)

    def run(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._connection.execute(statement, values)

    def insert(self, table: str, *, or_ignore: bool = False, **values: object) -> None:
        """or_ignore: unless there is one with the same key."""
        self.run(
            f"INSERT {'OR IGNORE ' if or_ignore else ''}INTO {table} ({', '.join(values)})"
            f" VALUES ({', '.join('?' * len(values))})",
            *values.values(),
        )

    def run_many(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._connection.executemany(statement, rows)

    def one(self, query: str, *values: object) -> sqlite3.Row:
        found: sqlite3.Row = self._connection.execute(query, values).fetchone()
        return found

    def first(self, query: str, *values: object) -> sqlite3.Row | None:
        found: sqlite3.Row | None = self._connection.execute(query, values).fetchone()
        return found

    def all(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self._connection.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def give_space_back(self) -> None:
        """Return the pages of deleted rows to the file system."""
        self._connection.execute("PRAGMA incremental_vacuum").fetchall()
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._connection.close()


class DatabaseThread:
    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "batches-database")

    async def call(self, work: Callable[..., Result], *values: object) -> Result:
        """It ends also where its caller is cancelled. Raises InsufficientStorageError: a full
        disk.
        """
        running = asyncio.get_running_loop().run_in_executor(self._executor, work, *values)
        with telling_full_disk():
            return await asyncio.shield(running)

    def call_blocking(self, work: Callable[..., Result], *values: object) -> Result:
        """The same from another thread, which waits."""
        return self._executor.submit(work, *values).result()

    def close(self) -> None:
        self._executor.shutdown()


@contextmanager
def telling_full_disk() -> Iterator[None]:
    """Raises InsufficientStorageError for a write that failed for want of room."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise disk_full() from error
        raise
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
            raise disk_full() from error
        raise


def disk_full() -> InsufficientStorageError:
    return InsufficientStorageError(
        "The server's disk for files and batches is full. Delete files that are not needed, or "
        "tell the operator."
    )


def make_private(file: Path) -> None:
    """Make a file that nobody else reads, or make of one that is there one such."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(handle, 0o600)
    finally:
        os.close(handle)


def check_local(folder: Path) -> None:
    """Raises ConfigurationError for a network file system, whose locks do not protect SQLite's
    file.
    """
    around = [
        one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)
    ]
    for mount in sorted(around, key=lambda one: len(Path(one.mountpoint).parts))[-1:]:
        if mount.fstype in NETWORKED:
            raise ConfigurationError(
                f"batches.folder {folder} is on {mount.fstype}, a network file system, where "
                "SQLite loses data; name a folder on a local disk or on a block volume"
            )

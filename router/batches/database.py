"""Opens the SQLite database of files, batches and lines, and runs its transactions in one thread.

A transaction is on the disk when it returns. The process that opens the database locks it until it
closes it. Network file systems are refused because their locks do not hold. Files and batches are
stored as the API's JSON documents, with generated columns for the queried fields.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil

from cluster.common.errors import ConfigurationError, InsufficientStorageError

FILE_NAME = "batches.sqlite"
VERSION = 5
# File systems on which several machines may see different states.
NETWORKED = (
    *("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4"),
    *("orangefs", "pvfs2", "smb3", "smbfs"),
    *("fuse.blobfuse", "fuse.blobfuse2", "fuse.ceph", "fuse.ceph-fuse", "fuse.dfuse"),
    *("fuse.gcsfuse", "fuse.glusterfs", "fuse.goofys", "fuse.juicefs", "fuse.mfs"),
    *("fuse.mountpoint-s3", "fuse.rclone", "fuse.s3fs", "fuse.sshfs"),
)
SCHEMA = """
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    document TEXT NOT NULL,
    purpose TEXT AS (json_extract(document, '$.purpose')) STORED,
    bytes INTEGER AS (json_extract(document, '$.bytes')) STORED,
    expires_at INTEGER AS (json_extract(document, '$.expires_at')) STORED
);
CREATE INDEX files_by_owner ON files (owner, seq);
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    document TEXT NOT NULL,
    status TEXT AS (json_extract(document, '$.status')) STORED,
    input_file_id TEXT AS (json_extract(document, '$.input_file_id')) STORED,
    webhook_due_at INTEGER AS (json_extract(document, '$.webhook_due_at')) STORED
);
CREATE INDEX batches_by_webhook ON batches (webhook_due_at);
CREATE INDEX batches_by_owner ON batches (owner, seq);
CREATE INDEX batches_by_status ON batches (status, seq);
CREATE TABLE lines (
    batch_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    offset INTEGER NOT NULL,
    length INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting',
    attempts INTEGER NOT NULL DEFAULT 0,
    result TEXT,
    UNIQUE (batch_id, number)
);
CREATE INDEX lines_by_state ON lines (batch_id, state, number);
CREATE TABLE usage (
    owner TEXT NOT NULL,
    day INTEGER NOT NULL,
    lines INTEGER NOT NULL,
    audio_s REAL NOT NULL,
    PRIMARY KEY (owner, day)
);
"""

# In memory only. bytes: the larger of the announced and the received size; grew_at: Unix time.
UPLOADS = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE uploads (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    grew_at INTEGER NOT NULL
);
"""

Result = TypeVar("Result")
Values = ParamSpec("Values")


def new_id(kind: str) -> str:
    return f"{kind}{secrets.token_hex(12)}"


class Database:
    def __init__(self, folder: Path, owned_s: float = 0.0) -> None:
        """Raises ConfigurationError if another process keeps the lock for longer than `owned_s`, or
        if another version of splitscribe wrote the file.
        """
        file = folder / FILE_NAME
        file.touch(0o600)
        file.chmod(0o600)  # SQLite copies this mode to its WAL file
        self._thread = ThreadPoolExecutor(1, "batches-database")
        self.connection = sqlite3.connect(
            file, owned_s, isolation_level="IMMEDIATE", check_same_thread=False
        )
        try:
            self.connection.executescript(
                "PRAGMA locking_mode = EXCLUSIVE; PRAGMA auto_vacuum = INCREMENTAL;"
                "BEGIN EXCLUSIVE; COMMIT;"
            )
        except sqlite3.OperationalError as error:
            self.connection.close()
            if error.sqlite_errorname != "SQLITE_BUSY":
                raise
            raise ConfigurationError(
                f"batches.folder {folder} belongs to another process that runs; give each "
                "application a folder of its own"
            ) from error
        (version,) = self.run("PRAGMA user_version").fetchone()
        if version not in (0, VERSION):
            self.connection.close()
            age = "a newer" if version > VERSION else "an older"
            raise ConfigurationError(f"{file} was written by {age} version of splitscribe")
        if version == 0:
            self.connection.executescript(
                f"BEGIN; {SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;"
            )
        self.run("PRAGMA journal_mode = WAL")
        self.run("PRAGMA synchronous = FULL")  # a commit survives a power failure
        self.connection.executescript(UPLOADS)

    def run(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self.connection.execute(statement, values)

    async def call(
        self, work: Callable[Values, Result], *values: Values.args, **named: Values.kwargs
    ) -> Result:
        """Run `work` in the thread as a transaction, to its end even if the caller is cancelled.

        Raises InsufficientStorageError if the disk is full.
        """
        running = self._thread.submit(self._transact, partial(work, *values, **named))
        with telling_full_disk():
            return await asyncio.shield(asyncio.wrap_future(running))

    def call_blocking(self, work: Callable[[], Result]) -> Result:
        """Run `work` as one transaction, and wait for it in the calling thread."""
        return self._thread.submit(self._transact, work).result()

    def _transact(self, work: Callable[[], Result]) -> Result:
        with self.connection:
            return work()

    def give_space_back(self) -> None:
        """Return the pages of deleted rows to the file system."""
        self.run("PRAGMA incremental_vacuum").fetchall()
        self.run("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        self._thread.submit(self.connection.close)
        self._thread.shutdown()


@contextmanager
def telling_full_disk() -> Iterator[None]:
    """Turn the errors of writes to a full disk into InsufficientStorageError."""
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


def check_local(folder: Path) -> None:
    """Raises ConfigurationError if `folder` is on a network file system."""
    around = [
        one for one in psutil.disk_partitions(all=True) if folder.is_relative_to(one.mountpoint)
    ]
    for mount in sorted(around, key=lambda one: len(Path(one.mountpoint).parts))[-1:]:
        if mount.fstype in NETWORKED:
            raise ConfigurationError(
                f"batches.folder {folder} is on {mount.fstype}, a network file system, where "
                "SQLite loses data; name a folder on a local disk or on a block volume"
            )

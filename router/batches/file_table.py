"""The rows of files. Runs in the database's thread; the bytes are `router.batches.blobs`'s.

A deleted file's row stays until its bytes are gone, so that a download that runs can end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from cluster.errors import ConflictError, NotFoundError
from router.batches.database import Database
from router.batches.interface import ENDED, Listing, Order, StoredFile
from router.batches.listing import read_page


class FileTable:
    """Files of all keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, owner: str, file: StoredFile) -> StoredFile:
        """Insert a file, unless that was done before. Returns it as it stands."""
        with self._database.transaction():
            self.insert(owner, file)
        return self.get(owner, file.id, file.created_at)

    def insert(self, owner: str, file: StoredFile) -> None:
        """`add`, within a transaction of the caller's."""
        self._database.run(
            "INSERT OR IGNORE INTO files (id, owner, purpose, filename, size_bytes, created_at,"
            " expires_at) VALUES (?, ?, ?, ?, ?, ?, ?)",
            file.id,
            owner,
            file.purpose,
            file.filename,
            file.size_bytes,
            file.created_at,
            file.expires_at,
        )

    def get(self, owner: str, file_id: str, now: int) -> StoredFile:
        """Raises NotFoundError."""
        row = self._database.first(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND NOT deleted"
            " AND (expires_at IS NULL OR expires_at > ?)",
            file_id,
            owner,
            now,
        )
        if row is None:
            raise no_such_file(file_id)
        return _file(row)

    def page(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None, now: int
    ) -> Listing[StoredFile]:
        """A page, by the time of creation. Raises InvalidRequestError for an unknown `after`."""
        where: tuple[str, ...] = ("NOT deleted", "(expires_at IS NULL OR expires_at > ?)")
        values: tuple[object, ...] = (now,)
        if purpose is not None:
            where, values = (*where, "purpose = ?"), (*values, purpose)
        return read_page(
            self._database,
            "files",
            owner,
            after,
            limit,
            _file,
            order=order,
            where=where,
            values=values,
        )

    def delete(self, owner: str, file_id: str, now: int) -> None:
        """Raises NotFoundError, or ConflictError where a batch still reads it."""
        with self._database.transaction():
            self.get(owner, file_id, now)
            reader = self._database.first(
                "SELECT id FROM batches WHERE input_file_id = ?"
                f" AND status NOT IN ({_marks(ENDED)})",
                file_id,
                *ENDED,
            )
            if reader is not None:
                raise ConflictError(
                    f"The file is the input of batch {reader['id']}, which has not ended; cancel "
                    "the batch first, or wait for its end.",
                    code="file_in_use",
                )
            self._database.run("UPDATE files SET deleted = 1 WHERE id = ?", file_id)

    def used_bytes(self, owner: str, but: str) -> int:
        """Of all files of a key that are not deleted, apart from one."""
        row = self._database.one(
            "SELECT coalesce(sum(size_bytes), 0) FROM files"
            " WHERE owner = ? AND NOT deleted AND id != ?",
            owner,
            but,
        )
        return int(row[0])

    def totals(self) -> tuple[int, int]:
        """Number and bytes of all files of all keys."""
        row = self._database.one(
            "SELECT count(*), coalesce(sum(size_bytes), 0) FROM files WHERE NOT deleted"
        )
        return int(row[0]), int(row[1])

    def expire(self, now: int) -> None:
        """Delete what has expired, but for the input of a batch that has not ended."""
        self._database.run(
            "UPDATE files SET deleted = 1 WHERE NOT deleted AND expires_at <= ? AND id NOT IN"
            f" (SELECT input_file_id FROM batches WHERE status NOT IN ({_marks(ENDED)}))",
            now,
            *ENDED,
        )

    def deleted(self) -> list[str]:
        """Files whose bytes may go."""
        return [row["id"] for row in self._database.all("SELECT id FROM files WHERE deleted")]

    def forget(self, file_ids: Collection[str]) -> None:
        """Their bytes are gone."""
        with self._database.transaction():
            self._database.run_many(
                "DELETE FROM files WHERE id = ?", ((file_id,) for file_id in file_ids)
            )

    def known(self) -> set[str]:
        """All ids, those of deleted files too."""
        return {row["id"] for row in self._database.all("SELECT id FROM files")}


def no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id[:64]}", param="id")


def _marks(values: Collection[str]) -> str:
    return ", ".join("?" * len(values))


def _file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(
        row["id"],
        row["purpose"],
        row["filename"],
        row["size_bytes"],
        row["created_at"],
        row["expires_at"],
    )

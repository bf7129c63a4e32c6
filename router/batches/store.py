"""What is kept of files and of batches. Runs in the database's thread.

The bytes of files are in `router.batches.blobs`, lines and webhooks in `router.batches.work_queue`.
A deleted file's row stays until its bytes are gone, so that a download that runs can end. Batches:

    validating -> failed
               -> in_progress -> finalizing -> completed | expired
                              -> cancelling -> cancelled

While its files are being written, `ends_as` says what a batch will be: after a restart they are
written again.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from cluster.common.errors import ConflictError, InvalidRequestError, NotFoundError, RateLimitError
from router.api.batch_bodies import (
    Batch,
    BatchError,
    BatchPage,
    CreateBatchRequest,
    FileObject,
    FilePage,
    Status,
    expiry_s,
)
from router.batches.database import Database, new_id

Order = Literal["asc", "desc"]

ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
MAX_READERS = 4  # batches that have not ended, of one input file
WINDOW_S = 24 * 3600  # completion_window, of which OpenAI has one
OPEN = "('validating', 'in_progress', 'finalizing', 'cancelling')"
EXISTS = "NOT deleted AND (expires_at IS NULL OR expires_at > ?)"

BatchModel = TypeVar("BatchModel", bound=Batch)


class OpenBatch(Batch):
    owner: str
    ends_as: Status | None = None
    output_expires_after_s: int | None = None

    @property
    def unfinished(self) -> int:
        """Lines that have no result; of a batch that is in progress."""
        counts = self.request_counts
        return counts.total - counts.completed - counts.failed


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line that was checked. offset, length: of its bytes in the input file."""

    number: int
    custom_id: str
    offset: int
    length: int


class Store:
    def __init__(self, database: Database) -> None:
        self._database = database

    # ------------------------------------------------------------------------------- files

    def add_file(self, owner: str, file: FileObject) -> FileObject:
        """Unless that was done before. Returns it as it stands."""
        with self._database.transaction():
            self._insert_file(owner, file)
        return self.file(owner, file.id, file.created_at)

    def file(self, owner: str, file_id: str, now: int) -> FileObject:
        """Raises NotFoundError."""
        row = self._database.first(
            f"SELECT * FROM files WHERE id = ? AND owner = ? AND {EXISTS}", file_id, owner, now
        )
        if row is None:
            raise no_such_file(file_id)
        return _file(row)

    def files(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None, now: int
    ) -> FilePage:
        """A page, by the time of creation. Raises InvalidRequestError for an unknown `after`."""
        where = f"{EXISTS} AND purpose = coalesce(?, purpose)"
        rows, has_more = self._page("files", owner, after, limit, order, where, now, purpose)
        return FilePage.of([_file(row) for row in rows], has_more)

    def delete_file(self, owner: str, file_id: str, now: int) -> None:
        """Raises NotFoundError, or ConflictError where a batch still reads it."""
        with self._database.transaction():
            self.file(owner, file_id, now)
            reader = self._database.first(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {OPEN}", file_id
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
        (used,) = self._database.one(
            "SELECT coalesce(sum(size_bytes), 0) FROM files"
            " WHERE owner = ? AND NOT deleted AND id != ?",
            owner,
            but,
        )
        return int(used)

    def file_totals(self) -> tuple[int, int]:
        n_files, n_bytes = self._database.one(
            "SELECT count(*), coalesce(sum(size_bytes), 0) FROM files WHERE NOT deleted"
        )
        return int(n_files), int(n_bytes)

    def expire_files(self, now: int) -> list[str]:
        """Delete what has expired, but for inputs that are read. Returns all that are deleted."""
        self._database.run(
            "UPDATE files SET deleted = 1 WHERE NOT deleted AND expires_at <= ? AND id NOT IN"
            f" (SELECT input_file_id FROM batches WHERE status IN {OPEN})",
            now,
        )
        return [row["id"] for row in self._database.all("SELECT id FROM files WHERE deleted")]

    def forget_files(self, file_ids: Collection[str]) -> None:
        """Their bytes are gone."""
        with self._database.transaction():
            self._database.run_many("DELETE FROM files WHERE id = ?", ((one,) for one in file_ids))

    def known_files(self) -> set[str]:
        return {row["id"] for row in self._database.all("SELECT id FROM files")}

    # ----------------------------------------------------------------------------- batches

    def add_batch(
        self, owner: str, batch_id: str, asked: CreateBatchRequest, now: int, most: int
    ) -> Batch:
        """Unless that was done before. Returns it as it stands. Raises NotFoundError: its input
        file is not there; RateLimitError: the key has `most` batches, or the file `MAX_READERS`.
        """
        with self._database.transaction():
            if self._database.first("SELECT id FROM batches WHERE id = ?", batch_id) is None:
                self.file(owner, asked.input_file_id, now)
                self._check_count("This API key", "owner", owner, most)
                self._check_count(
                    "The input file", "input_file_id", asked.input_file_id, MAX_READERS
                )
                self._database.insert(
                    "batches",
                    id=batch_id,
                    owner=owner,
                    input_file_id=asked.input_file_id,
                    endpoint=asked.endpoint,
                    status="validating",
                    created_at=now,
                    expires_at=now + WINDOW_S,
                    metadata=None if asked.metadata is None else json.dumps(asked.metadata),
                    output_expires_after_s=expiry_s(asked.output_expires_after),
                    webhook_url=asked.webhook_url,
                )
        return self.batch(owner, batch_id)

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Raises NotFoundError."""
        row = self._database.first(
            "SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner
        )
        if row is None:
            raise NotFoundError(f"No batch found with id '{batch_id[:64]}'.", param="batch_id")
        return _batch(row, Batch)

    def batches(self, owner: str, after: str | None, limit: int) -> BatchPage:
        """A page, the newest first. Raises InvalidRequestError for an unknown `after`."""
        rows, has_more = self._page("batches", owner, after, limit)
        return BatchPage.of([_batch(row, Batch) for row in rows], has_more)

    def cancel(self, owner: str, batch_id: str, now: int) -> Batch:
        """Let it end. Raises ConflictError where it has ended, or is about to."""
        with self._database.transaction():
            status = self.batch(owner, batch_id).status
            if status not in ("validating", "in_progress", "cancelling", "cancelled"):
                raise ConflictError(
                    f"Cannot cancel a batch with status '{status}'.", code="batch_not_cancellable"
                )
            if status in ("validating", "in_progress"):
                self._come_into("cancelling", batch_id, now)
                self._database.run(
                    "UPDATE batches SET ends_as = 'cancelled' WHERE id = ?", batch_id
                )
        return self.batch(owner, batch_id)

    def open_batches(self) -> list[OpenBatch]:
        rows = self._database.all(f"SELECT * FROM batches WHERE status IN {OPEN} ORDER BY seq")
        return [_batch(row, OpenBatch) for row in rows]

    def begin_check(self, batch_id: str) -> int:
        """Its input is about to be checked. Returns how many times that was begun."""
        self._database.run("UPDATE batches SET checks = checks + 1 WHERE id = ?", batch_id)
        (begun,) = self._database.one("SELECT checks FROM batches WHERE id = ?", batch_id)
        return int(begun)

    def release_check(self, batch_id: str) -> None:
        """The check was ended on purpose; it does not count."""
        self._database.run("UPDATE batches SET checks = checks - 1 WHERE id = ?", batch_id)

    def refuse(self, batch_id: str, errors: Sequence[BatchError], now: int) -> None:
        with self._database.transaction():
            if self._is(batch_id, "validating"):
                stored = json.dumps([error.model_dump() for error in errors])
                self._database.run("UPDATE batches SET errors = ? WHERE id = ?", stored, batch_id)
                self._end(batch_id, "failed", now)

    def begin(self, batch_id: str, lines: Collection[NewLine], model: str | None, now: int) -> None:
        """Its lines may be run, unless it was cancelled meanwhile."""
        with self._database.transaction():
            if not self._is(batch_id, "validating"):
                return
            self._database.run(
                "UPDATE batches SET total = ?, model = ? WHERE id = ?", len(lines), model, batch_id
            )
            self._come_into("in_progress", batch_id, now)
            self._database.run_many(
                "INSERT INTO lines (batch_id, number, custom_id, offset, length)"
                " VALUES (?, ?, ?, ?, ?)",
                ((batch_id, one.number, one.custom_id, one.offset, one.length) for one in lines),
            )

    def wind_up(self, batch_id: str, ends_as: Status, now: int) -> None:
        """No line of it will be run any more: its files are to be written."""
        with self._database.transaction():
            self._database.run("UPDATE batches SET ends_as = ? WHERE id = ?", ends_as, batch_id)
            if not self._is(batch_id, "cancelling"):
                self._come_into("finalizing", batch_id, now)

    def end(
        self, batch: OpenBatch, output: FileObject | None, errors: FileObject | None, now: int
    ) -> None:
        """It has ended, and these are its files; its lines are forgotten."""
        assert batch.ends_as is not None
        with self._database.transaction():
            for file in (output, errors):
                if file is not None:
                    self._insert_file(batch.owner, file)
            self._database.run(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, ends_as = NULL"
                " WHERE id = ?",
                output and output.id,
                errors and errors.id,
                batch.id,
            )
            self._database.run("DELETE FROM lines WHERE batch_id = ?", batch.id)
            self._end(batch.id, batch.ends_as, now)
        self._database.give_space_back()

    def forget_batches(self, before: int) -> None:
        for status in ENDED:
            self._database.run(
                "DELETE FROM batches WHERE status = ? AND json_extract(times, ?) < ?",
                status,
                f"$.{status}_at",
                before,
            )

    # -------------------------------------------------------------------------------- both

    def _page(
        self,
        table: Literal["files", "batches"],
        owner: str,
        after: str | None,
        limit: int,
        order: Order = "desc",
        where: str = "true",
        *values: object,
    ) -> tuple[Iterable[sqlite3.Row], bool]:
        """At most `limit` rows by their creation, behind `after`; and if more are. where, values: a
        further condition. Raises InvalidRequestError: the key has no row called `after`.
        """
        seq, sign = 0 if order == "asc" else 2**62, ">" if order == "asc" else "<"
        if after is not None:
            found = self._database.first(
                f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", after, owner
            )
            if found is None:
                raise InvalidRequestError(
                    f"'after' names nothing that is listed here: {after[:64]!r}", param="after"
                )
            seq = found["seq"]
        rows = self._database.all(
            f"SELECT * FROM {table} WHERE owner = ? AND seq {sign} ? AND {where}"
            f" ORDER BY seq {order} LIMIT ?",
            owner,
            seq,
            *values,
            limit + 1,  # one more, which tells whether there are more
        )
        return rows[:limit], len(rows) > limit

    def _insert_file(self, owner: str, file: FileObject) -> None:
        self._database.insert(
            "files",
            or_ignore=True,
            owner=owner,
            size_bytes=file.bytes,
            **file.model_dump(exclude={"object", "status", "bytes"}),
        )

    def _check_count(self, whose: str, column: str, value: str, most: int) -> None:
        (n_open,) = self._database.one(
            f"SELECT count(*) FROM batches WHERE {column} = ? AND status IN {OPEN}", value
        )
        if n_open >= most:
            raise RateLimitError(
                f"{whose} has {n_open} batches that have not ended, of at most {most}. "
                "Please try again when one has ended.",
                code="batch_limit_exceeded",
                retry_after_s=60.0,
            )

    def _is(self, batch_id: str, status: Status) -> bool:
        row = self._database.one("SELECT status FROM batches WHERE id = ?", batch_id)
        return bool(row["status"] == status)

    def _come_into(self, status: Status, batch_id: str, now: int) -> None:
        self._database.run(
            "UPDATE batches SET status = ?, times = json_set(times, ?, ?) WHERE id = ?",
            status,
            f"$.{status}_at",
            now,
            batch_id,
        )

    def _end(self, batch_id: str, status: Status, now: int) -> None:
        """Come into a state that is an end, of which a webhook is to tell."""
        self._come_into(status, batch_id, now)
        self._database.run(
            "INSERT INTO webhooks (id, batch_id, url, type, created_at, due_at)"
            " SELECT ?, id, webhook_url, ?, ?, ? FROM batches"
            " WHERE id = ? AND webhook_url IS NOT NULL",
            new_id("evt_"),
            f"batch.{status}",
            now,
            now,
            batch_id,
        )


def no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id[:64]}", param="id")


def _file(row: sqlite3.Row) -> FileObject:
    return FileObject.model_validate({**dict(row), "bytes": row["size_bytes"]})


def _batch(row: sqlite3.Row, model: type[BatchModel]) -> BatchModel:
    """Columns are called as the fields of `model`, where these are no objects."""
    errors = json.loads(row["errors"])
    return model.model_validate(
        {
            **dict(row),
            **json.loads(row["times"]),
            "errors": {"data": errors} if errors else None,
            "metadata": json.loads(row["metadata"] or "null"),
            "request_counts": dict(row),
        }
    )

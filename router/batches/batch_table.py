"""The rows of batches and their states. Runs in the database's thread.

    validating -> failed
               -> in_progress -> finalizing -> completed | expired
                              -> cancelling -> cancelled

While its files are being written, `ends_as` says what a batch will be: after a restart they are
written again. Its lines are `router.batches.line_table`'s.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cluster.errors import ConflictError, NotFoundError, RateLimitError
from router.batches.database import Database
from router.batches.file_table import FileTable
from router.batches.interface import (
    ENDED,
    Batch,
    InputError,
    Listing,
    NewBatch,
    Status,
    StoredFile,
    new_id,
)
from router.batches.listing import read_page

WINDOW_S = 24 * 3600  # completion_window, of which OpenAI has one
STAMPS = {  # which time is noted when a batch comes into a state
    "in_progress": "in_progress_at",
    "finalizing": "finalizing_at",
    "completed": "completed_at",
    "failed": "failed_at",
    "expired": "expired_at",
    "cancelling": "cancelling_at",
    "cancelled": "cancelled_at",
}


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that has not ended, as the owner needs it."""

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    status: Status
    ends_as: Status | None
    expires_at: int
    output_expires_after_s: int | None
    unfinished: int  # lines; of a batch that is in progress


class BatchTable:
    """Batches of all keys."""

    def __init__(self, database: Database, files: FileTable) -> None:
        self._database = database
        self._files = files

    def add(self, owner: str, batch: NewBatch, now: int, most: int) -> Batch:
        """Insert a batch, unless that was done before. Returns it as it stands.

        Raises:
            NotFoundError: its input file is not there.
            RateLimitError: the key has `most` batches already.
        """
        with self._database.transaction():
            known = self._database.first("SELECT id FROM batches WHERE id = ?", batch.id)
            if known is None:
                self._files.get(owner, batch.input_file_id, now)
                self._check_count(owner, most)
                self._database.run(
                    "INSERT INTO batches (id, owner, input_file_id, endpoint, status, created_at,"
                    " expires_at, metadata, output_expires_after_s, webhook_url)"
                    " VALUES (?, ?, ?, ?, 'validating', ?, ?, ?, ?, ?)",
                    batch.id,
                    owner,
                    batch.input_file_id,
                    batch.endpoint,
                    now,
                    now + WINDOW_S,
                    None if batch.metadata is None else json.dumps(dict(batch.metadata)),
                    batch.output_expires_after_s,
                    batch.webhook_url,
                )
        return self.get(owner, batch.id)

    def get(self, owner: str, batch_id: str) -> Batch:
        """Raises NotFoundError."""
        row = self._database.first(
            "SELECT * FROM batches WHERE id = ? AND owner = ?", batch_id, owner
        )
        if row is None:
            raise NotFoundError(f"No batch found with id '{batch_id[:64]}'.", param="batch_id")
        return _batch(row)

    def page(self, owner: str, after: str | None, limit: int) -> Listing[Batch]:
        """A page, the newest first. Raises InvalidRequestError for an unknown `after`."""
        return read_page(self._database, "batches", owner, after, limit, _batch)

    def cancel(self, owner: str, batch_id: str, now: int) -> Batch:
        """Let it end. Raises ConflictError where it has ended, or is about to."""
        with self._database.transaction():
            status = self.get(owner, batch_id).status
            if status not in ("validating", "in_progress", "cancelling", "cancelled"):
                raise ConflictError(
                    f"Cannot cancel a batch with status '{status}'.", code="batch_not_cancellable"
                )
            if status in ("validating", "in_progress"):
                self._come_into("cancelling", batch_id, now)
                self._database.run(
                    "UPDATE batches SET ends_as = 'cancelled' WHERE id = ?", batch_id
                )
        return self.get(owner, batch_id)

    def open(self) -> list[OpenBatch]:
        """All that have not ended, the oldest first."""
        rows = self._database.all(
            "SELECT * FROM batches WHERE status IN"
            " ('validating', 'in_progress', 'finalizing', 'cancelling') ORDER BY seq"
        )
        return [
            OpenBatch(
                row["id"],
                row["owner"],
                row["input_file_id"],
                row["endpoint"],
                row["status"],
                row["ends_as"],
                row["expires_at"],
                row["output_expires_after_s"],
                row["total"] - row["completed"] - row["failed"],
            )
            for row in rows
        ]

    def begin_check(self, batch_id: str) -> int:
        """Its input is about to be checked. Returns how many times that was begun."""
        self._database.run("UPDATE batches SET checks = checks + 1 WHERE id = ?", batch_id)
        row = self._database.one("SELECT checks FROM batches WHERE id = ?", batch_id)
        return int(row["checks"])

    def release_check(self, batch_id: str) -> None:
        """The check was ended on purpose; it does not count."""
        self._database.run("UPDATE batches SET checks = checks - 1 WHERE id = ?", batch_id)

    def refuse(self, batch_id: str, errors: Sequence[InputError], now: int) -> None:
        """Its input is not right."""
        with self._database.transaction():
            if not self._is(batch_id, "validating"):
                return
            self._database.run(
                "UPDATE batches SET errors = ? WHERE id = ?",
                json.dumps([asdict(error) for error in errors]),
                batch_id,
            )
            self._come_into("failed", batch_id, now)
            self._announce(batch_id, "failed", now)

    def begin(self, batch_id: str, total: int, model: str | None, now: int) -> bool:
        """Its lines may be run, within a transaction of the caller's; False: it was cancelled."""
        if not self._is(batch_id, "validating"):
            return False
        self._database.run(
            "UPDATE batches SET total = ?, model = ? WHERE id = ?", total, model, batch_id
        )
        self._come_into("in_progress", batch_id, now)
        return True

    def wind_up(self, batch_id: str, ends_as: Status, now: int) -> None:
        """No line of it will be run any more: its files are to be written."""
        with self._database.transaction():
            self._database.run("UPDATE batches SET ends_as = ? WHERE id = ?", ends_as, batch_id)
            if not self._is(batch_id, "cancelling"):
                self._come_into("finalizing", batch_id, now)

    def end(
        self,
        batch: OpenBatch,
        output: StoredFile | None,
        errors: StoredFile | None,
        now: int,
    ) -> None:
        """It has ended, and these are its files; its lines are forgotten."""
        assert batch.ends_as is not None
        with self._database.transaction():
            for file in (output, errors):
                if file is not None:
                    self._files.insert(batch.owner, file)
            self._database.run(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, ends_as = NULL"
                " WHERE id = ?",
                output and output.id,
                errors and errors.id,
                batch.id,
            )
            self._come_into(batch.ends_as, batch.id, now)
            self._database.run("DELETE FROM lines WHERE batch_id = ?", batch.id)
            self._announce(batch.id, batch.ends_as, now)

    def forget_ended(self, before: int) -> None:
        """Delete batches that ended before then."""
        for status in ENDED:
            self._database.run(
                "DELETE FROM batches WHERE status = ? AND json_extract(times, ?) < ?",
                status,
                f"$.{STAMPS[status]}",
                before,
            )

    def _announce(self, batch_id: str, status: Status, now: int) -> None:
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

    def _check_count(self, owner: str, most: int) -> None:
        row = self._database.one(
            "SELECT count(*) FROM batches WHERE owner = ? AND status NOT IN (?, ?, ?, ?)",
            owner,
            *ENDED,
        )
        if row[0] >= most:
            raise RateLimitError(
                f"This API key has {row[0]} batches that have not ended, of at most {most}. "
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
            f"$.{STAMPS[status]}",
            now,
            batch_id,
        )


def _batch(row: sqlite3.Row) -> Batch:
    return Batch(
        id=row["id"],
        input_file_id=row["input_file_id"],
        endpoint=row["endpoint"],
        status=row["status"],
        created_at=row["created_at"],
        expires_at=row["expires_at"],
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        model=row["model"],
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        errors=tuple(map(_input_error, json.loads(row["errors"]))),
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        times=json.loads(row["times"]),
    )


def _input_error(stored: dict[str, Any]) -> InputError:
    """Errors quote an input, which may once have had what is no text."""
    readable: dict[str, Any] = {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in stored.items()
    }
    return InputError(**readable)

"""Stores the metadata of files and batches. All functions run in `Database.call`.

A file's row is deleted before its bytes. The states of a batch are:

    validating -> failed
               -> in_progress -> finalizing -> completed | expired
                              -> cancelling -> cancelled

While its result files are written, `ends_as` holds the final state. After a restart they are
written again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from cluster.common.errors import ConflictError, InvalidRequestError, NotFoundError, RateLimitError
from router.api.batch_bodies import (
    Batch,
    BatchError,
    BatchErrors,
    BatchPage,
    CreateBatchRequest,
    FileObject,
    FilePage,
    Page,
    RequestCounts,
    Status,
    expiry_s,
)
from router.batches.database import Database

Order = Literal["asc", "desc"]

ENDED: tuple[Status, ...] = ("failed", "completed", "expired", "cancelled")
MAX_READERS = 4  # open batches of one input file
WINDOW_S = 24 * 3600  # the only completion_window of OpenAI
OPEN = "('validating', 'in_progress', 'finalizing', 'cancelling')"
EXISTS = "(expires_at IS NULL OR expires_at > ?)"

PageModel = TypeVar("PageModel", bound=Page)


class OpenBatch(Batch):
    owner: str
    ends_as: Status | None = None
    output_expires_after_s: int | None = None
    webhook_url: str | None = None
    webhook_tries: int = 0
    webhook_due_at: int | None = None  # Unix time of the next try; None: no try is due
    checks: int = 0  # started checks of the input file

    @property
    def unfinished(self) -> int:
        counts = self.request_counts
        return counts.total - counts.completed - counts.failed


@dataclass(frozen=True, slots=True)
class NewLine:
    number: int
    custom_id: str
    offset: int  # in the input file, in bytes
    length: int  # in bytes


class Store:
    def __init__(self, database: Database, unix_time: Callable[[], float]) -> None:
        self.database = database
        self._unix_time = unix_time

    @property
    def now(self) -> int:
        return int(self._unix_time())

    # ------------------------------------------------------------------------------- files

    def add_file(self, owner: str, file: FileObject) -> FileObject:
        """Insert the row of an uploaded file, if it is new, and return the stored file."""
        self._insert_file(owner, file)
        self.database.run("DELETE FROM uploads WHERE id = ?", file.id)
        return self.file(owner, file.id)

    def files(
        self, owner: str, after: str | None, limit: int, order: Order, purpose: str | None
    ) -> FilePage:
        """Raises InvalidRequestError if `after` is unknown."""
        where = f"{EXISTS} AND purpose = coalesce(?, purpose)"
        return self._page(FilePage, "files", owner, after, limit, order, where, self.now, purpose)

    def delete_file(self, owner: str, file_id: str) -> None:
        """Raises NotFoundError, or ConflictError if the file is the input of an open batch."""
        self.file(owner, file_id)
        reader = self._first(
            f"SELECT id FROM batches WHERE input_file_id = ? AND status IN {OPEN}", file_id
        )
        if reader is not None:
            raise ConflictError(
                f"The file is the input of batch {reader}, which has not ended. Cancel the batch "
                "first, or wait until it ends.",
                code="file_in_use",
            )
        self.database.run("DELETE FROM files WHERE id = ?", file_id)

    def file_totals(self) -> tuple[int, int]:
        n_files, n_bytes = self.database.run(
            "SELECT count(*), coalesce(sum(bytes), 0) FROM files"
        ).fetchone()
        return int(n_files), int(n_bytes)

    def expire_files(self) -> set[str]:
        """Delete expired files that are no input of an open batch. Return the remaining ids."""
        self.database.run(
            "DELETE FROM files WHERE expires_at <= ? AND id NOT IN"
            f" (SELECT input_file_id FROM batches WHERE status IN {OPEN})",
            self.now,
        )
        return {file_id for (file_id,) in self.database.run("SELECT id FROM files")}

    def new_file(
        self, file_id: str, purpose: str, filename: str, size_bytes: int, kept_s: int | None
    ) -> FileObject:
        now = self.now
        return FileObject(
            id=file_id,
            bytes=size_bytes,
            created_at=now,
            expires_at=now + kept_s if kept_s else None,
            filename=filename,
            purpose=purpose,
        )

    def file(self, owner: str, file_id: str) -> FileObject:
        """Raises NotFoundError."""
        found = self._first(
            f"SELECT document FROM files WHERE id = ? AND owner = ? AND {EXISTS}",
            file_id,
            owner,
            self.now,
        )
        if found is None:
            raise no_such_file(file_id)
        return FileObject.model_validate_json(found)

    def _insert_file(self, owner: str, file: FileObject) -> None:
        self.database.run(
            "INSERT OR IGNORE INTO files (id, owner, document) VALUES (?, ?, ?)",
            file.id,
            owner,
            file.model_dump_json(),
        )

    # ----------------------------------------------------------------------------- batches

    def add_batch(self, owner: str, batch_id: str, asked: CreateBatchRequest, most: int) -> Batch:
        """Insert the batch, if it is new. Raises NotFoundError and RateLimitError."""
        if self._first("SELECT id FROM batches WHERE id = ?", batch_id) is None:
            self.file(owner, asked.input_file_id)
            self._check_count("This API key", "owner", owner, most)
            self._check_count("The input file", "input_file_id", asked.input_file_id, MAX_READERS)
            batch = OpenBatch(
                **asked.model_dump(include={"input_file_id", "endpoint", "metadata"}),
                id=batch_id,
                owner=owner,
                status="validating",
                created_at=self.now,
                expires_at=self.now + WINDOW_S,
                request_counts=RequestCounts(total=0, completed=0, failed=0),
                output_expires_after_s=expiry_s(asked.output_expires_after),
                webhook_url=asked.webhook_url,
            )
            self.database.run(
                "INSERT INTO batches (id, owner, document) VALUES (?, ?, ?)",
                batch_id,
                owner,
                batch.model_dump_json(),
            )
        return self.batch(owner, batch_id)

    def batches(self, owner: str, after: str | None, limit: int) -> BatchPage:
        """Return the newest first. Raises InvalidRequestError if `after` is unknown."""
        return self._page(BatchPage, "batches", owner, after, limit)

    def cancel(self, owner: str, batch_id: str) -> Batch:
        """Raises ConflictError if the batch has ended otherwise, or is finalizing."""
        status = self.batch(owner, batch_id).status
        if status not in ("validating", "in_progress", "cancelling", "cancelled"):
            raise ConflictError(
                f"Cannot cancel a batch with status '{status}'.", code="batch_not_cancellable"
            )
        if status in ("validating", "in_progress"):
            with self._changing(batch_id) as batch:
                batch.ends_as = "cancelled"
                self._come_into(batch, "cancelling")
        return self.batch(owner, batch_id)

    def open_batches(self) -> list[OpenBatch]:
        rows = self.database.run(
            f"SELECT document FROM batches WHERE status IN {OPEN} ORDER BY seq"
        )
        return [OpenBatch.model_validate_json(document) for (document,) in rows]

    def count_check(self, batch_id: str) -> int:
        """Count a check before it starts. Return the number of started checks."""
        with self._changing(batch_id) as batch:
            batch.checks += 1
        return batch.checks

    def release_check(self, batch_id: str, counts: bool) -> None:
        """End a check without a result. counts: whether it counts as a try."""
        with self._changing(batch_id) as batch:
            batch.checks -= not counts

    def refuse(self, batch_id: str, errors: Sequence[BatchError]) -> bool:
        """Fail the batch, unless it was cancelled meanwhile. Return whether it has failed."""
        with self._changing(batch_id) as batch:
            if batch.status == "validating":
                batch.errors = BatchErrors(data=list(errors))
                self._end(batch, "failed")
        return batch.status == "failed"

    def begin(self, batch_id: str, lines: Collection[NewLine], model: str | None) -> None:
        """Insert the lines of a valid batch, unless it was cancelled meanwhile."""
        with self._changing(batch_id) as batch:
            if batch.status != "validating":
                return
            batch.request_counts.total, batch.model = len(lines), model
            self._come_into(batch, "in_progress")
            self.database.connection.executemany(
                "INSERT INTO lines (batch_id, number, custom_id, offset, length)"
                " VALUES (?, ?, ?, ?, ?)",
                ((batch_id, one.number, one.custom_id, one.offset, one.length) for one in lines),
            )

    def wind_up(self, batch_id: str, ends_as: Status) -> None:
        """Start to write the result files, unless the batch was cancelled meanwhile."""
        with self._changing(batch_id) as batch:
            if batch.status != "cancelling":
                batch.ends_as = ends_as
                self._come_into(batch, "finalizing")

    def end(self, batch_id: str, output: FileObject | None, errors: FileObject | None) -> None:
        with self._changing(batch_id) as batch:
            assert batch.ends_as is not None
            for file in (output, errors):
                if file is not None:
                    self._insert_file(batch.owner, file)
            batch.output_file_id = output.id if output else None
            batch.error_file_id = errors.id if errors else None
            self.database.run("DELETE FROM lines WHERE batch_id = ?", batch_id)
            self._end(batch, batch.ends_as)

    def forget_batches(self, kept_s: int) -> None:
        """Delete batches that ended, or were to call a webhook, more than `kept_s` seconds ago."""
        ended_at = "json_extract(document, '$.' || status || '_at')"
        self.database.run(
            f"DELETE FROM batches WHERE status NOT IN {OPEN}"
            f" AND coalesce(webhook_due_at, {ended_at}) < ?",
            self.now - kept_s,
        )

    def due_webhooks(self, but: Collection[str], most: int) -> list[OpenBatch]:
        """Return at most `most` batches whose webhook is due. but: batch ids to leave out."""
        rows = self.database.run(
            "SELECT id, document FROM batches WHERE webhook_due_at <= ?"
            " ORDER BY webhook_due_at LIMIT ?",
            self.now,
            most + len(but),
        )
        due = [document for batch_id, document in rows if batch_id not in but]
        return [OpenBatch.model_validate_json(document) for document in due[:most]]

    def note_webhook(self, batch_id: str, delay_s: int | None) -> None:
        """Count a try. delay_s: time until the next one; None: delivered, or no further try."""
        with self._changing(batch_id) as batch:
            batch.webhook_tries += 1
            batch.webhook_due_at = None if delay_s is None else self.now + delay_s

    def batch(self, owner: str, batch_id: str) -> Batch:
        """Raises NotFoundError."""
        found = self._first(
            "SELECT document FROM batches WHERE id = ? AND owner = ?", batch_id, owner
        )
        if found is None:
            raise NotFoundError(f"No batch found with id '{batch_id[:64]}'.", param="batch_id")
        return Batch.model_validate_json(found)

    @contextmanager
    def _changing(self, batch_id: str) -> Iterator[OpenBatch]:
        found = self._first("SELECT document FROM batches WHERE id = ?", batch_id)
        batch = OpenBatch.model_validate_json(found)
        yield batch
        document = batch.model_dump_json()
        self.database.run("UPDATE batches SET document = ? WHERE id = ?", document, batch_id)

    def _come_into(self, batch: OpenBatch, status: Status) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", self.now)

    def _end(self, batch: OpenBatch, status: Status) -> None:
        batch.ends_as = None
        self._come_into(batch, status)
        batch.webhook_due_at = self.now if batch.webhook_url else None

    def _check_count(self, whose: str, column: str, value: str, most: int) -> None:
        n_open = self._first(
            f"SELECT count(*) FROM batches WHERE {column} = ? AND status IN {OPEN}", value
        )
        if n_open >= most:
            raise RateLimitError(
                f"{whose} has {n_open} batches that have not ended, of at most {most}. "
                "Please try again when one has ended.",
                code="batch_limit_exceeded",
                retry_after_s=60.0,
            )

    # -------------------------------------------------------------------------------- both

    def _first(self, query: str, *values: object) -> Any:
        row = self.database.run(query, *values).fetchone()
        return row and row[0]

    def _page(
        self,
        page: type[PageModel],
        table: Literal["files", "batches"],
        owner: str,
        after: str | None,
        limit: int,
        order: Order = "desc",
        where: str = "true",
        *values: object,
    ) -> PageModel:
        """where, values: a further condition. Raises InvalidRequestError if `after` is unknown."""
        seq, sign = 0 if order == "asc" else 2**62, ">" if order == "asc" else "<"
        if after is not None:
            seq = self._first(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", after, owner)
            if seq is None:
                raise InvalidRequestError(
                    f"'after' is not the id of a listed object: {after[:64]!r}", param="after"
                )
        rows = self.database.run(
            f"SELECT document FROM {table} WHERE owner = ? AND seq {sign} ? AND {where}"
            f" ORDER BY seq {order} LIMIT ?",
            owner,
            seq,
            *values,
            limit + 1,  # one more, to know whether there are more
        ).fetchall()
        data = [json.loads(document) for (document,) in rows[:limit]]
        ids = [one["id"] for one in data] or [None]
        told = {"data": data, "first_id": ids[0], "last_id": ids[-1]}
        return page.model_validate({**told, "has_more": len(rows) > limit})


def no_such_file(file_id: str) -> NotFoundError:
    return NotFoundError(f"No such File object: {file_id[:64]}", param="id")

"""The rows of batches' lines: claims and results. Runs in the database's thread.

A line is waiting, claimed, completed or failed. A claim is of one owner: the next one finds the
claims of those before it and takes the lines anew, and a result is taken from whoever holds the
claim, once. Result and count change in one transaction, so that no line counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from router.batches.batch_table import BatchTable
from router.batches.database import Database

Outcome = Literal["completed", "failed"]
RESULTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class NewLine:
    """A line that was checked. offset, length: of its bytes in the input file."""

    number: int
    custom_id: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Claim:
    """A line that this owner runs. attempts: owners that claimed it, this one included."""

    batch_id: str
    owner: str
    input_file_id: str
    endpoint: str
    expires_at: int
    number: int
    custom_id: str
    offset: int
    length: int
    attempts: int


class LineTable:
    """Lines of all batches."""

    def __init__(self, database: Database, batches: BatchTable) -> None:
        self._database = database
        self._batches = batches
        database.run(
            "UPDATE lines SET state = 'waiting' WHERE state = 'claimed' AND epoch < ?",
            database.epoch,
        )

    def begin(self, batch_id: str, lines: Collection[NewLine], model: str | None, now: int) -> bool:
        """Insert a batch's lines, which may be run then. False: it was cancelled meanwhile."""
        with self._database.transaction():
            if not self._batches.begin(batch_id, len(lines), model, now):
                return False
            self._database.run_many(
                "INSERT INTO lines (batch_id, number, custom_id, offset, length)"
                " VALUES (?, ?, ?, ?, ?)",
                ((batch_id, one.number, one.custom_id, one.offset, one.length) for one in lines),
            )
        return True

    def claim(self, batch_ids: Iterable[str]) -> Claim | None:
        """Take the next line of the first of these batches that has one waiting."""
        for batch_id in batch_ids:
            with self._database.transaction():
                row = self._database.first(
                    "SELECT lines.*, owner, input_file_id, endpoint, expires_at FROM lines"
                    " JOIN batches ON batches.id = batch_id"
                    " WHERE batch_id = ? AND state = 'waiting' AND status = 'in_progress'"
                    " ORDER BY number LIMIT 1",
                    batch_id,
                )
                if row is None:
                    continue
                self._database.run(
                    "UPDATE lines SET state = 'claimed', epoch = ?, attempts = attempts + 1"
                    " WHERE batch_id = ? AND number = ?",
                    self._database.epoch,
                    batch_id,
                    row["number"],
                )
                return Claim(
                    batch_id,
                    row["owner"],
                    row["input_file_id"],
                    row["endpoint"],
                    row["expires_at"],
                    row["number"],
                    row["custom_id"],
                    row["offset"],
                    row["length"],
                    row["attempts"] + 1,
                )
        return None

    def settle(self, claim: Claim, outcome: Outcome, result: str) -> bool:
        """Store a line's result. False: the claim is not this owner's any more."""
        with self._database.transaction():
            changed = self._database.run(
                "UPDATE lines SET state = ?, result = ?"
                " WHERE batch_id = ? AND number = ? AND state = 'claimed' AND epoch = ?",
                outcome,
                result,
                claim.batch_id,
                claim.number,
                self._database.epoch,
            )
            if changed.rowcount:
                self._count(claim.batch_id, outcome, 1)
        return bool(changed.rowcount)

    def release(self, claim: Claim, counts: bool = False) -> None:
        """Give a line back that was not run to its end. counts: the claim does, too."""
        self._database.run(
            "UPDATE lines SET state = 'waiting', attempts = attempts - ?"
            " WHERE batch_id = ? AND number = ? AND state = 'claimed' AND epoch = ?",
            int(not counts),
            claim.batch_id,
            claim.number,
            self._database.epoch,
        )

    def give_up(self, batch_id: str) -> None:
        """Lines that wait or run fail, without a result of their own."""
        with self._database.transaction():
            changed = self._database.run(
                "UPDATE lines SET state = 'failed', result = NULL"
                " WHERE batch_id = ? AND state IN ('waiting', 'claimed')",
                batch_id,
            )
            self._count(batch_id, "failed", changed.rowcount)

    def results(
        self, batch_id: str, outcome: Outcome, after: int
    ) -> list[tuple[int, str, str | None]]:
        """The next results in the order of the input: (number, custom_id, result)."""
        rows = self._database.all(
            "SELECT number, custom_id, result FROM lines"
            " WHERE batch_id = ? AND state = ? AND number > ? ORDER BY number LIMIT ?",
            batch_id,
            outcome,
            after,
            RESULTS_AT_ONCE,
        )
        return [(row["number"], row["custom_id"], row["result"]) for row in rows]

    def _count(self, batch_id: str, outcome: Outcome, by: int) -> None:
        self._database.run(
            f"UPDATE batches SET {outcome} = {outcome} + ? WHERE id = ?", by, batch_id
        )

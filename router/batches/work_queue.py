"""Stores the lines of batches and each key's usage. All functions but `results` run in
`Database.call`.

A line is waiting, claimed, completed or failed. After a restart, claimed lines wait again. A line's
result and the batch's counts change in one transaction, so that no line counts twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

from router.batches.database import Database
from router.batches.store import OpenBatch

Outcome = Literal["completed", "failed"]
Result = tuple[int, str, str | None]  # number and custom_id of a line, and its result
RESULTS_AT_ONCE = 64
Usage = tuple[int, int, float]  # day since 1970, lines that ended, seconds of audio
DAY_S = 86_400
USAGE_DAYS = 31  # days of usage that are kept


@dataclass(frozen=True, slots=True)
class Claim:
    batch: OpenBatch
    number: int
    custom_id: str
    offset: int
    length: int
    attempts: int  # number of claims, this one included


class WorkQueue:
    def __init__(self, database: Database, unix_time: Callable[[], float]) -> None:
        self.database = database
        self._unix_time = unix_time

    def take_over(self) -> None:
        self.database.run("UPDATE lines SET state = 'waiting' WHERE state = 'claimed'")

    def claim(self, batches: Iterable[OpenBatch]) -> Claim | None:
        """Claim the next line of the first batch that has a waiting line."""
        for batch in batches:
            row = self.database.run(
                "SELECT number, custom_id, offset, length, attempts + 1 FROM lines"
                " JOIN batches ON batches.id = batch_id"
                " WHERE batch_id = ? AND state = 'waiting' AND status = 'in_progress'"
                " ORDER BY number LIMIT 1",
                batch.id,
            ).fetchone()
            if row is not None:
                self.database.run(
                    "UPDATE lines SET state = 'claimed', attempts = attempts + 1"
                    " WHERE batch_id = ? AND number = ?",
                    batch.id,
                    row[0],
                )
                return Claim(batch, *row)
        return None

    def settle(self, claim: Claim, outcome: Outcome, result: str, audio_s: float) -> None:
        """Store a result, unless the line was given up meanwhile. audio_s: 0.0 if it failed."""
        if self._change(claim, "state = ?, result = ?", outcome, result):
            self._count(claim.batch.id, outcome, 1)
            self.database.run(
                "INSERT INTO usage VALUES (?, ?, 1, ?) ON CONFLICT (owner, day) DO UPDATE"
                " SET lines = lines + 1, audio_s = audio_s + excluded.audio_s",
                claim.batch.owner,
                self._unix_time() // DAY_S,
                audio_s,
            )

    def release(self, claim: Claim, counts: bool) -> None:
        """Let an unfinished line wait again. counts: whether the claim counts as an attempt."""
        self._change(claim, "state = 'waiting', attempts = attempts - ?", int(not counts))

    def give_up(self, batch_id: str) -> set[Outcome]:
        """Fail all lines that wait or run, and return the outcomes of all lines."""
        changed = self.database.run(
            "UPDATE lines SET state = 'failed', result = NULL"
            " WHERE batch_id = ? AND state IN ('waiting', 'claimed')",
            batch_id,
        )
        self._count(batch_id, "failed", changed.rowcount)
        states = self.database.run("SELECT DISTINCT state FROM lines WHERE batch_id = ?", batch_id)
        return {state for (state,) in states}

    def results(self, batch_id: str, outcome: Outcome) -> Iterator[Result]:
        """Yield all results in the order of the input, read in pages. Called in a thread."""
        after = 0
        while page := self.database.call_blocking(partial(self._page, batch_id, outcome, after)):
            yield from page
            after = page[-1][0]

    def _page(self, batch_id: str, outcome: Outcome, after: int) -> list[Result]:
        return self.database.run(
            "SELECT number, custom_id, result FROM lines"
            " WHERE batch_id = ? AND state = ? AND number > ? ORDER BY number LIMIT ?",
            batch_id,
            outcome,
            after,
            RESULTS_AT_ONCE,
        ).fetchall()

    def usage(self, owner: str) -> list[Usage]:
        return self.database.run(
            "SELECT day, lines, audio_s FROM usage WHERE owner = ? ORDER BY day", owner
        ).fetchall()

    def forget_usage(self) -> None:
        oldest = self._unix_time() // DAY_S - USAGE_DAYS
        self.database.run("DELETE FROM usage WHERE day <= ?", oldest)

    def _change(self, claim: Claim, what: str, *values: object) -> int:
        """Return the number of changed rows: 0 if the line is no longer claimed."""
        return self.database.run(
            f"UPDATE lines SET {what} WHERE batch_id = ? AND number = ? AND state = 'claimed'",
            *values,
            claim.batch.id,
            claim.number,
        ).rowcount

    def _count(self, batch_id: str, outcome: Outcome, by: int) -> None:
        field = f"$.request_counts.{outcome}"
        self.database.run(
            "UPDATE batches SET document = json_set(document, ?, json_extract(document, ?) + ?)"
            " WHERE id = ?",
            field,
            field,
            by,
            batch_id,
        )

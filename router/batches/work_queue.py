"""What is left to do: lines of batches, and webhooks. Runs in the database's thread.

A line is waiting, claimed, completed or failed. A claim is of one owner: the next one takes the
lines of those before it anew, and a result is taken from whoever holds the claim, once. Result and
count change in one transaction, so that no line counts twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from router.batches.database import Database
from router.batches.store import OpenBatch

Outcome = Literal["completed", "failed"]
Result = tuple[int, str, str | None]  # number and custom_id of a line, and what came of it
RESULTS_AT_ONCE = 64
Usage = tuple[int, int, float]  # day since 1970, lines that ended, seconds of audio
DAY_S = 86_400
USAGE_DAYS = 31  # that are kept


@dataclass(frozen=True, slots=True)
class Claim:
    """A line that this owner runs. attempts: owners that claimed it, this one included."""

    batch: OpenBatch
    number: int
    custom_id: str
    offset: int
    length: int
    attempts: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A webhook: one event and where it goes."""

    id: str
    batch_id: str
    url: str
    type: str
    created_at: int
    attempts: int

    @property
    def body(self) -> bytes:
        event = {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": self.type,
            "data": {"id": self.batch_id},
        }
        return json.dumps(event, separators=(",", ":")).encode()


class WorkQueue:
    def __init__(self, database: Database) -> None:
        self._database = database
        database.run(
            "UPDATE lines SET state = 'waiting' WHERE state = 'claimed' AND epoch < ?",
            database.epoch,
        )

    def claim(self, batches: Iterable[OpenBatch]) -> Claim | None:
        """Take the next line of the first of these batches that has one waiting."""
        for batch in batches:
            with self._database.transaction():
                row = self._database.first(
                    "SELECT number, custom_id, offset, length, attempts + 1 FROM lines"
                    " JOIN batches ON batches.id = batch_id"
                    " WHERE batch_id = ? AND state = 'waiting' AND status = 'in_progress'"
                    " ORDER BY number LIMIT 1",
                    batch.id,
                )
                if row is not None:
                    self._database.run(
                        "UPDATE lines SET state = 'claimed', epoch = ?, attempts = attempts + 1"
                        " WHERE batch_id = ? AND number = ?",
                        self._database.epoch,
                        batch.id,
                        row["number"],
                    )
                    return Claim(batch, *row)
        return None

    def settle(self, claim: Claim, outcome: Outcome, result: str, audio_s: float, now: int) -> None:
        """Unless the claim is not this owner's any more. audio_s: transcribed; 0.0 where it
        failed.
        """
        with self._database.transaction():
            if self._change(claim, "state = ?, result = ?", outcome, result):
                self._count(claim.batch.id, outcome, 1)
                self._database.run(
                    "INSERT INTO usage VALUES (?, ?, 1, ?) ON CONFLICT DO UPDATE"
                    " SET lines = lines + 1, audio_s = audio_s + excluded.audio_s",
                    claim.batch.owner,
                    now // DAY_S,
                    audio_s,
                )

    def release(self, claim: Claim, counts: bool = False) -> None:
        """Give a line back that was not run to its end. counts: the claim does, too."""
        self._change(claim, "state = 'waiting', attempts = attempts - ?", int(not counts))

    def give_up(self, batch_id: str) -> None:
        """Lines that wait or run fail, without a result of their own."""
        with self._database.transaction():
            changed = self._database.run(
                "UPDATE lines SET state = 'failed', result = NULL"
                " WHERE batch_id = ? AND state IN ('waiting', 'claimed')",
                batch_id,
            )
            self._count(batch_id, "failed", changed.rowcount)

    def results(self, batch_id: str, outcome: Outcome, after: int) -> list[Result]:
        """The next results in the order of the input."""
        rows = self._database.all(
            "SELECT number, custom_id, result FROM lines"
            " WHERE batch_id = ? AND state = ? AND number > ? ORDER BY number LIMIT ?",
            batch_id,
            outcome,
            after,
            RESULTS_AT_ONCE,
        )
        return [(row["number"], row["custom_id"], row["result"]) for row in rows]

    def usage(self, owner: str) -> list[Usage]:
        """What a key's lines have used on each day."""
        rows = self._database.all(
            "SELECT day, lines, audio_s FROM usage WHERE owner = ? ORDER BY day", owner
        )
        return [(row["day"], row["lines"], row["audio_s"]) for row in rows]

    def forget_usage(self, now: int) -> None:
        self._database.run("DELETE FROM usage WHERE day <= ?", now // DAY_S - USAGE_DAYS)

    def due_webhooks(self, now: int, but: frozenset[str], most: int) -> list[Delivery]:
        """Apart from those that are being made."""
        rows = self._database.all(
            "SELECT id, batch_id, url, type, created_at, attempts FROM webhooks"
            " WHERE due_at <= ? ORDER BY due_at LIMIT ?",
            now,
            most + len(but),
        )
        return [Delivery(*row) for row in rows if row["id"] not in but][:most]

    def forget_webhook(self, delivery: Delivery) -> None:
        self._database.run("DELETE FROM webhooks WHERE id = ?", delivery.id)

    def put_off_webhook(self, delivery: Delivery, due_at: int) -> None:
        self._database.run(
            "UPDATE webhooks SET attempts = attempts + 1, due_at = ? WHERE id = ?",
            due_at,
            delivery.id,
        )

    def _change(self, claim: Claim, what: str, *values: object) -> int:
        """Returns how many rows were changed: none where the claim is another owner's."""
        return self._database.run(
            f"UPDATE lines SET {what}"
            " WHERE batch_id = ? AND number = ? AND state = 'claimed' AND epoch = ?",
            *values,
            claim.batch.id,
            claim.number,
            self._database.epoch,
        ).rowcount

    def _count(self, batch_id: str, outcome: Outcome, by: int) -> None:
        self._database.run(
            f"UPDATE batches SET {outcome} = {outcome} + ? WHERE id = ?", by, batch_id
        )

"""One run over an archive: what is to be done, and its way through Ray Data into the output.

Longest files go first, so that none is left alone at the end. Blocks stream: a bounded number of
files is worked on, and what is done is written at once. Knows neither flags nor how the Ray cluster
was found.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cluster.archives.archive import Archive
from cluster.archives.inputs import Item
from cluster.archives.item_transcriber import blocks_of, stream_blocks
from cluster.archives.ledger import OWN, Done, Ledger
from cluster.archives.long_files import HowFar, make_board, watched
from cluster.archives.outputs import missing_outputs, output_names, write_outputs
from cluster.archives.places import Place
from cluster.archives.progress import RunProgress
from cluster.archives.rows import ITEM_COLUMNS, RESULT_COLUMNS, Row
from cluster.archives.transcriber import digest_of, map_options

FAILURES = "failures.csv"
WRITERS = 8  # files written at a time: a bucket takes its time for each
Transcribe = Callable[[list[str]], Iterator[Any]]  # blocks -> tables as they are done


@dataclass(slots=True)
class Plan:
    """pending: longest first. failed: keys that failed before, and are left alone."""

    pending: list[Item]
    outputs: dict[str, str]
    n_done: int = 0
    failed: list[str] = field(default_factory=list)

    @property
    def about_s(self) -> float:
        return sum(item.about_s for item in self.pending)


def make_plan(archive: Archive, items: Sequence[Item], ledger: Ledger) -> Plan:
    """Which items are missing, and what the outputs of all are called.

    What failed for a reason that may pass is missing too; what failed for its own only with
    `retry_failed`.
    """
    known = _known(archive, items, ledger)
    plan = Plan([], output_names(items, ledger.done))
    for item in items:
        done = known.get(item.key)
        if done is None or (done.error is not None and (done.retryable or archive.retry_failed)):
            plan.pending.append(item)
        elif done.error is None:
            plan.n_done += 1
        else:
            plan.failed.append(item.key)
    plan.pending.sort(key=lambda item: -item.about_s)
    return plan


def _known(archive: Archive, items: Sequence[Item], ledger: Ledger) -> dict[str, Done]:
    """The rows that are of these very items, transcribed with these settings."""
    settings = archive.settings
    known = {
        item.key: done
        for item in items
        if (done := ledger.done.get(item.key)) is not None and done.is_of(item, settings)
    }
    if archive.match == "content":
        for item in items:
            done = ledger.done.get(item.key)
            if item.key in known or done is None or done.settings != settings or item.row >= 0:
                continue
            place = Place.of(item.path)
            if place.is_local and item.size == done.size and done.digest == digest_of(place.local):
                known[item.key] = done
    return known


def run_archive(
    archive: Archive,
    plan: Plan,
    items: Sequence[Item],
    ledger: Ledger,
    progress: RunProgress,
    transcribe: Transcribe | None = None,
) -> None:
    """Transcribe what is pending, and write it; also outputs that are missing of what is done.

    transcribe: None: by Ray Data, in the Ray cluster of this process.

    Raises:
        SplitscribeError: there is no application to ask, or it refuses the fields.
        OSError: the output cannot be written.
    """
    by_key = {item.key: item for item in plan.pending}
    with ThreadPoolExecutor(WRITERS) as threads:
        _write_missing(archive, plan, items, ledger, threads)
        blocks = blocks_of(plan.pending)
        tables = (transcribe or ray_data(archive, progress.heard))(blocks) if blocks else iter(())
        for table in tables:
            rows = [_archived(row, by_key, archive, plan) for row in table.to_pylist()]
            _write_all(rows, archive, threads)
            ledger.add(rows)
            progress.add(rows)


def ray_data(archive: Archive, heard: Callable[[HowFar], None]) -> Transcribe:
    """Stream blocks through Ray Data and the application of this Ray cluster.

    heard: told how far files are that take long, by another thread.
    """

    def transcribe(blocks: list[str]) -> Iterator[Any]:
        board = make_board()
        options = map_options(
            archive.fields,
            archive.task,
            transcribers=archive.transcribers,
            files_at_once=archive.files_at_once,
            board=board,
        )
        with watched(board, heard):
            yield from stream_blocks(blocks, options)

    return transcribe


def write_failures(archive: Archive, items: Iterable[Item], ledger: Ledger) -> int:
    """Write the table of these items' failures with their reasons. Returns how many there are."""
    failed = [
        (item.key, done.error)
        for item in items
        if (done := ledger.done.get(item.key)) is not None and done.error is not None
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "reason"))
    writer.writerows(sorted(failed))
    (archive.where / FAILURES).write_whole(text.getvalue().encode())
    return len(failed)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run measured. speed: hours of audio in an hour."""

    speed: float
    audio_s: float


def keep_measured(where: Place, measured: Measured) -> None:
    """Leave it for `--dry-run`."""
    content = {"hours_per_hour": measured.speed, "audio_s": measured.audio_s}
    (where / f"{OWN}/speed.json").write_whole(json.dumps(content).encode())


def read_measured(where: Place) -> Measured | None:
    """What the last run measured that did something; None: there was none."""
    try:
        content = json.loads((where / f"{OWN}/speed.json").read())
        return Measured(content["hours_per_hour"], content["audio_s"])
    except (OSError, ValueError, KeyError):
        return None


def _archived(table_row: Row, by_key: dict[str, Item], archive: Archive, plan: Plan) -> Row:
    item = by_key[table_row["key"]]
    row = dict.fromkeys(ITEM_COLUMNS) | {name: table_row[name] for name in RESULT_COLUMNS}
    return row | {
        "path": item.key,
        "size": item.size,
        "mtime_ns": item.mtime_ns,
        "digest": table_row["digest"],
        "settings": archive.settings,
        "output": plan.outputs[item.key],
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _write_missing(
    archive: Archive,
    plan: Plan,
    items: Sequence[Item],
    ledger: Ledger,
    threads: ThreadPoolExecutor,
) -> None:
    """Outputs of formats that an earlier run did not write: their texts are there."""
    pending = {item.key for item in plan.pending}
    keys = {item.key for item in items} & ledger.done.keys() - pending
    if missing := missing_outputs(ledger.done, keys, archive.where, archive.formats):
        for row in ledger.rows(missing):
            _write_all([row], archive, threads)


def _write_all(rows: Sequence[Row], archive: Archive, threads: ThreadPoolExecutor) -> None:
    def write(row: Row) -> None:
        write_outputs(row, archive.where, archive.formats, words=archive.words)

    list(threads.map(write, rows))

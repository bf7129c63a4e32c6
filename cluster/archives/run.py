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
from cluster.archives.item_transcriber import blocks_of, item_digest, stream_blocks
from cluster.archives.ledger import OWN, Done, Ledger
from cluster.archives.long_files import HowFar, make_board, watched
from cluster.archives.outputs import missing_outputs, output_names, write_outputs
from cluster.archives.places import Place
from cluster.archives.progress import RunProgress
from cluster.archives.rows import ITEM_COLUMNS, RESULT_COLUMNS, Row
from cluster.archives.transcriber import map_options

FAILURES = "failures.csv"
WRITERS = 8  # files written, or compared, at a time: a bucket takes its time for each
Transcribe = Callable[[list[str]], Iterator[Any]]  # blocks -> tables as they are done


@dataclass(slots=True)
class Plan:
    """pending: longest first. failed: keys that failed before, and are left alone.

    same: by key, the key whose row in the ledger is of the same content.
    """

    pending: list[Item]
    outputs: dict[str, str]
    n_done: int = 0
    failed: list[str] = field(default_factory=list)
    same: dict[str, str] = field(default_factory=dict)

    @property
    def about_s(self) -> float:
        return sum(item.about_s for item in self.pending)


def make_plan(archive: Archive, items: Sequence[Item], ledger: Ledger) -> Plan:
    """Which items are missing, and what the outputs of all are called.

    What failed for a reason that may pass is missing too; what failed for its own only with
    `retry_failed`.
    """
    plan = Plan([], output_names(items, ledger.done))
    known = _known(archive, items, ledger)
    if archive.match == "content":
        rest = [item for item in items if item.key not in known]
        plan.same = _same_content(rest, archive.settings, ledger)
        known |= {key: ledger.done[twin] for key, twin in plan.same.items()}
    for item in items:
        done = known.get(item.key)
        if done is None or (done.error is not None and (done.retryable or archive.retry_failed)):
            plan.pending.append(item)
            plan.same.pop(item.key, None)
        elif done.error is None:
            plan.n_done += 1
        else:
            plan.failed.append(item.key)
    plan.pending.sort(key=lambda item: -item.about_s)
    return plan


def _known(archive: Archive, items: Sequence[Item], ledger: Ledger) -> dict[str, Done]:
    """The rows that are of these very items, transcribed with these settings."""
    settings = archive.settings
    return {
        item.key: done
        for item in items
        if (done := ledger.done.get(item.key)) is not None and done.is_of(item, settings)
    }


def _same_content(items: Sequence[Item], settings: str, ledger: Ledger) -> dict[str, str]:
    """By key, the key of a row with the same content, wherever that was.

    Only what may be one is read: of an item within a Parquet file the size is not known.
    """
    done = [(key, one) for key, one in ledger.done.items() if one.settings == settings]
    by_digest = {one.digest: key for key, one in done if one.digest is not None}
    sizes = {one.size for _, one in done}
    maybe = [item for item in items if by_digest and (item.row >= 0 or item.size in sizes)]
    with ThreadPoolExecutor(WRITERS) as threads:
        digests = threads.map(item_digest, maybe)
        return {
            item.key: by_digest[digest]
            for item, digest in zip(maybe, digests, strict=True)
            if digest is not None and digest in by_digest
        }


def run_archive(
    archive: Archive,
    plan: Plan,
    items: Sequence[Item],
    ledger: Ledger,
    progress: RunProgress,
    transcribe: Transcribe | None = None,
) -> None:
    """Transcribe what is pending, and write it; also what is missing of what is done.

    transcribe: None: by Ray Data, in the Ray cluster of this process.

    Raises:
        SplitscribeError: there is no application to ask, or it refuses the fields.
        OSError: the output cannot be written.
    """
    by_key = {item.key: item for item in plan.pending}
    with ThreadPoolExecutor(WRITERS) as threads:
        _adopt(archive, plan, items, ledger, threads)
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
    """What a run measured. speed: hours of audio in an hour. why: of a trial that did nothing."""

    speed: float
    audio_s: float
    why: str = ""


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
    own = {
        "digest": table_row["digest"],
        "settings": archive.settings,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return row | own | _of_item(item, plan)


def _of_item(item: Item, plan: Plan) -> Row:
    """The columns that say which file a row is of."""
    return {
        "path": item.key,
        "size": item.size,
        "mtime_ns": item.mtime_ns,
        "output": plan.outputs[item.key],
    }


def _adopt(
    archive: Archive,
    plan: Plan,
    items: Sequence[Item],
    ledger: Ledger,
    threads: ThreadPoolExecutor,
) -> None:
    """Give files a row of their own whose content is done under another name, or was then older."""
    twins: dict[str, list[Item]] = {}
    for item in items:
        if item.key in plan.same:
            twins.setdefault(plan.same[item.key], []).append(item)
    for row in ledger.rows(set(twins)):
        rows = [row | _of_item(item, plan) for item in twins[row["path"]]]
        _write_all(rows, archive, threads)
        ledger.add(rows)


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

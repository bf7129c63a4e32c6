"""What of an archive is done: a data set of Parquet parts, and a journal of the run at work.

A row counts once it is in the journal, which is written before anybody is told: on this machine a
line at a time, in a bucket a small object every few seconds. When the run ends, or has many rows,
the journal becomes a part. A run that was killed leaves its journal to the next one. Of several
rows of one file the newest counts, and the others leave the data set when the run ends.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from cluster.archives.inputs import Item
from cluster.archives.places import Place
from cluster.archives.rows import Row, archive_schema
from cluster.errors import ConfigurationError, InvalidRequestError

DATASET = "transcripts"  # the folder of the parts
OWN = "_splitscribe"  # readers of data sets pass over names that begin so
PART_ROWS, PART_BYTES = 2000, 16 * 2**20  # of a journal that becomes a part, whichever comes first
OBJECT_ROWS, OBJECT_S = 64, 5.0  # of a journal in a bucket: an object for so many, or so often
KEPT = (
    "path",
    "size",
    "mtime_ns",
    "digest",
    "settings",
    "output",
    "duration",
    "error",
    "retryable",
)


@dataclass(frozen=True, slots=True)
class Done:
    """What the ledger knows of a file, without its text. part: where the row is; empty: a journal.

    error: why it failed; None: it did not.
    """

    size: int
    mtime_ns: int
    digest: str | None
    settings: str
    output: str
    duration: float | None
    error: str | None
    retryable: bool
    part: str = ""

    def is_of(self, item: Item, settings: str) -> bool:
        """Whether it is of this very file, transcribed with these settings."""
        same = (self.size, self.mtime_ns) == (item.size, item.mtime_ns)
        return same and self.settings == settings


class Ledger:
    """The rows of one output. Belongs to one run at a time; a context manager by `opened`."""

    def __init__(self, where: Place) -> None:
        self._where = where
        self._run = f"{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:8]}"
        self._journal = where / f"{OWN}/journal"
        self._lines: list[bytes] = []  # of the journal: as JSON a row takes a tenth of its memory
        self._bytes = 0
        self._file: IO[bytes] | None = None
        self._unwritten = 0  # the last rows, which are in no object yet
        self._written_s = time.monotonic()
        self._n_objects = self._n_parts = 0
        self._objects: list[Place] = []
        self._stale: dict[str, set[str]] = {}  # rows of older parts that newer ones replace
        self.done: dict[str, Done] = {}

    @classmethod
    @contextmanager
    def opened(cls, where: Place) -> Iterator[Self]:
        """Take what other runs left, and leave all that was added as parts.

        Raises:
            InvalidRequestError: another run is writing there, or what is there is not ours.
            ConfigurationError: the place cannot be read or written.
        """
        with _locked(where):
            ledger = cls(where)
            with _told(where):
                ledger._load()
            try:
                yield ledger
            except BaseException:
                with suppress(OSError):  # the journal stays, and the next run takes it
                    ledger._fold()
                raise
            with _told(where):
                ledger._fold()
                ledger._drop_stale()

    def add(self, rows: Iterable[Row]) -> None:
        """Keep rows; on this machine they are on the disk when this returns. Raises OSError."""
        fresh = list(rows)
        if not fresh:
            return
        for row in fresh:
            self._note(row, "")
        self._keep(json.dumps(row).encode() for row in fresh)
        self._unwritten += len(fresh)
        late = time.monotonic() - self._written_s > OBJECT_S
        if self._where.is_local or late or self._unwritten >= OBJECT_ROWS:
            self._write_journal()
        if len(self._lines) >= PART_ROWS or self._bytes >= PART_BYTES:
            self._fold()

    def rows(self, keys: set[str]) -> Iterator[Row]:
        """The whole rows of these files."""
        import pyarrow.parquet as pq

        journal = list(self._lines)  # the caller may add rows meanwhile
        yield from (row for row in map(json.loads, journal) if row["path"] in keys)
        for name in sorted({self.done[key].part for key in keys} - {""}):
            table = pq.read_table(io.BytesIO((self._where / f"{DATASET}/{name}").read()))
            for row in table.to_pylist():
                if row["path"] in keys and self.done[row["path"]].part == name:
                    yield row

    # ----------------------------------------------------------------------------- its files

    def _load(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for info in (self._where / DATASET).below():
            name = info.path.rpartition("/")[2]
            if not name.endswith(".parquet"):
                continue
            part = self._where / f"{DATASET}/{name}"
            if info.size == 0:  # a write into a bucket was interrupted: its rows are in the journal
                part.remove()
                continue
            try:
                with part.files.open_input_file(part.path) as content:  # the texts stay there
                    table = pq.read_table(content, columns=list(KEPT))
            except (pa.ArrowInvalid, KeyError) as error:
                raise InvalidRequestError(
                    f"{self._where.name}/{DATASET}/{name} is no part of an archive's transcripts: "
                    f"{error}"
                ) from error
            for row in table.to_pylist():
                self._note(row, name)
        for info in self._journal.below():
            left = self._journal / info.path.rpartition("/")[2]
            lines = list(_whole_lines(left.read()))
            for line in lines:
                self._note(json.loads(line), "")
            self._keep(lines)
            self._objects.append(left)
        if self._objects:
            self._fold()

    def _keep(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self._lines.append(line)
            self._bytes += len(line)

    def _note(self, row: Mapping[str, Any], part: str) -> None:
        key = row["path"]
        before = self.done.get(key)
        if before is not None and before.part and before.part != part:
            self._stale.setdefault(before.part, set()).add(key)
        self.done[key] = Done(**{name: row[name] for name in KEPT if name != "path"}, part=part)

    def _write_journal(self) -> None:
        lines = b"".join(line + b"\n" for line in self._lines[len(self._lines) - self._unwritten :])
        if self._where.is_local:
            if self._file is None:
                target = self._journal / f"{self._run}-{self._n_parts:04d}.jsonl"
                Path(self._journal.path).mkdir(parents=True, exist_ok=True)
                self._file = open(target.path, "ab")  # noqa: SIM115 - closed with the journal
                self._objects.append(target)
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        else:
            target = self._journal / f"{self._run}-{self._n_objects:06d}.jsonl"
            target.write_whole(lines)
            self._objects.append(target)
            self._n_objects += 1
        self._unwritten, self._written_s = 0, time.monotonic()

    def _fold(self) -> None:
        """Make the journal a part, then remove it: a row may be in both, and is never in none."""
        if self._lines:
            newest = {row["path"]: row for row in map(json.loads, self._lines)}
            name = f"part-{self._run}-{self._n_parts:04d}.parquet"
            (self._where / f"{DATASET}/{name}").write_whole(_as_parquet(list(newest.values())))
            self._n_parts += 1
            for row in newest.values():
                self._note(row, name)
        if self._file is not None:
            self._file.close()
        for one in self._objects:
            one.remove()
        self._lines, self._bytes, self._file, self._objects, self._unwritten = [], 0, None, [], 0

    def _drop_stale(self) -> None:
        """Take rows out of older parts that have newer ones, so that a file has one row."""
        import pyarrow.parquet as pq

        for name, keys in self._stale.items():
            part = self._where / f"{DATASET}/{name}"
            rows = pq.read_table(io.BytesIO(part.read())).to_pylist()
            if kept := [row for row in rows if row["path"] not in keys]:
                part.write_whole(_as_parquet(kept))
            else:
                part.remove()
        self._stale = {}


def _as_parquet(rows: list[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, archive_schema()), content, compression="zstd")
    return content.getvalue()


def _whole_lines(content: bytes) -> Iterator[bytes]:
    """Rows of a journal; what a killed run left half written at its end is none."""
    for line in content.split(b"\n"):
        try:
            json.loads(line)
        except ValueError:
            return
        yield line


@contextmanager
def _told(where: Place) -> Iterator[None]:
    """With the place's name in what is told of its errors."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{where.name} cannot be read or written: {error}") from error


@contextmanager
def _locked(where: Place) -> Iterator[None]:
    """Keep other runs of this machine out; buckets have no locks, so there nothing does."""
    if not where.is_local:
        yield
        return
    folder = Path(where.path) / OWN
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise InvalidRequestError(f"another run is writing to {where.name}") from error
    except (FileExistsError, NotADirectoryError, PermissionError) as error:
        raise InvalidRequestError(f"cannot write to {where.name}: {error.strerror}") from error

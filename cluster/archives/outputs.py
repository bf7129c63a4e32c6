"""What a run leaves of each input: a file for each format, and a sidecar that tells their source.

Files are called as their input is below the folder that was named, with the format in place of the
suffix. Where two inputs differ by their suffix alone, or have one name in two folders, the name of
the later one keeps its suffix, and then gets a number: `talk.wav.srt`, `talk.wav-2.srt`.

An input is done when its sidecar is there, with the same source and settings: beside `talk.srt` it
is `.talk.splitscribe.json`. It is written last and whole, and removed before its outputs are
written again, so that it is true at whatever moment a run is killed. One with an error tells why an
input failed.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

from cluster.archives.archive import FORMATS, Archive
from cluster.archives.inputs import Item
from cluster.archives.places import Place, shown
from cluster.archives.rows import error_text, may_pass
from cluster.common.errors import ConfigurationError, InvalidRequestError
from router.api.formats import render
from router.api.params import TranscriptionParams
from router.transcript import Segment, Transcript

FAILURES = "failures.csv"
LOCK, SPEED = ".splitscribe.lock", ".splitscribe.speed.json"
MOST_BYTES = 230  # of a part of a name, of which file systems take 255, with a sidecar's signs
READERS = 16  # of sidecars at a time: a bucket takes its time for each

Sidecar = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pending:
    """An item that is to be transcribed. output: what its outputs are called before the format."""

    item: Item
    output: str
    is_again: bool  # there is a sidecar, which no longer holds


@dataclass(frozen=True, slots=True)
class Left:
    """An item that is left alone. error: why it failed before; None: it is done."""

    item: Item
    error: str | None


class Outputs:
    """All outputs of one run. Any thread may write, of those of one item one at a time."""

    def __init__(self, archive: Archive, *, only_looks: bool = False) -> None:
        """only_looks: nothing is written. Raises ConfigurationError: the place cannot be read."""
        self._archive, self._only_looks = archive, only_looks
        self._where = archive.where
        self._owners: dict[str, str] = {}  # of names, the items of this run
        self._objects: frozenset[str] | None = None
        if not self._where.is_local:  # one listing, in place of a question for each file
            with told(self._where):
                self._objects = frozenset(one.path for one in self._where.below())

    @classmethod
    @contextmanager
    def opened(cls, archive: Archive, *, only_looks: bool = False) -> Iterator[Self]:
        """Keep other runs of this machine out; buckets have no locks, so there nothing does.

        Raises:
            InvalidRequestError: another run is writing there, or nothing can be written there.
            ConfigurationError: it cannot be read.
        """
        where = archive.where
        if not where.is_local:
            yield cls(archive, only_looks=only_looks)
            return
        try:
            Path(where.path).mkdir(parents=True, exist_ok=True)
            with open((where / LOCK).path, "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield cls(archive, only_looks=only_looks)
        except BlockingIOError as error:
            raise InvalidRequestError(f"another run is writing to {where.name}") from error
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise InvalidRequestError(f"cannot write to {where.name}: {error.strerror}") from error

    def look(self, items: Sequence[Item]) -> list[Pending | Left]:
        """What is to be done of each of these items; the formats that are missing are written.

        What failed for a reason that may pass is to be done again; what failed for its own only
        with `retry_failed`.
        """
        firsts = [next(names_of(item)) for item in items]
        with ThreadPoolExecutor(READERS) as threads:
            sidecars = dict(zip(firsts, threads.map(self._sidecar, firsts), strict=True))
            claims = [self._claim(item, sidecars) for item in items]
            return list(threads.map(self._judge, items, claims))

    def _claim(self, item: Item, read: Mapping[str, Sidecar | None]) -> tuple[str, Sidecar | None]:
        """A name that no other item has, in this run or before it, and its sidecar."""
        for name in names_of(item):
            sidecar = read[name] if name in read else self._sidecar(name)
            owner = item.key if sidecar is None else sidecar["source"]["path"]
            if owner == item.key and self._owners.setdefault(name, item.key) == item.key:
                return name, sidecar
        raise AssertionError("names never end")

    def _judge(self, item: Item, claim: tuple[str, Sidecar | None]) -> Pending | Left:
        name, sidecar = claim
        if sidecar is None:
            return Pending(item, name, is_again=False)
        again = Pending(item, name, is_again=True)
        if sidecar["source"] != source_of(item) or sidecar["settings"] != self._archive.settings:
            return again
        if sidecar["error"] is not None:
            tries = sidecar["may_pass"] or self._archive.retry_failed
            return again if tries else Left(item, sidecar["error"])
        written = sidecar["written"]
        missing = [
            one
            for one in self._archive.formats
            if one not in written or not self._is_there(f"{name}.{one}")
        ]
        if missing:
            transcript = self._kept(name, sidecar)
            if transcript is None or "json" in missing:
                return again
            if not self._only_looks:
                more = self._write_formats(name, transcript, missing)
                self._write_sidecar(name, {**sidecar, "written": {**written, **more}})
        return Left(item, None)

    def _kept(self, name: str, sidecar: Sidecar) -> Transcript | None:
        """The transcript, where its json is still as it was written."""
        try:
            content = (self._where / f"{name}.json").read()
        except OSError:
            return None
        is_ours = hash_of(content) == sidecar["written"].get("json")
        return transcript_of(content) if is_ours else None

    def write(self, pending: Pending, transcript: Transcript) -> None:
        """Write every format, and then the sidecar. Raises OSError."""
        if pending.is_again:
            with suppress(FileNotFoundError):
                self._where_of_sidecar(pending.output).remove()
        written = self._write_formats(pending.output, transcript, self._archive.formats)
        done = {"written": written, "duration": transcript.duration_s, "error": None}
        self._write_sidecar(pending.output, self._about(pending.item) | done)

    def write_failure(self, pending: Pending, error: Exception) -> None:
        """Keep why an item failed. Raises OSError."""
        failed = {"written": {}, "error": error_text(error), "may_pass": may_pass(error)}
        self._write_sidecar(pending.output, self._about(pending.item) | failed)

    def _about(self, item: Item) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        settings = self._archive.settings
        return {"source": source_of(item), "settings": settings, "finished_at": now}

    def _write_formats(
        self, name: str, transcript: Transcript, formats: Iterable[str]
    ) -> dict[str, str]:
        """Returns hashes of what was written, by format."""
        written = {}
        for one in formats:
            params = TranscriptionParams(
                "", response_format=FORMATS[one], words=self._archive.words
            )
            content, _ = render(transcript, params)
            (self._where / f"{name}.{one}").write_whole(content)
            written[one] = hash_of(content)
        return written

    def _write_sidecar(self, name: str, content: Sidecar) -> None:
        self._where_of_sidecar(name).write_whole(json.dumps(content, indent=1).encode())

    def _sidecar(self, name: str) -> Sidecar | None:
        """None: there is none, or it is not ours."""
        place = self._where_of_sidecar(name)
        if self._objects is not None and place.path not in self._objects:
            return None
        try:
            content = json.loads(place.read())
            return content if content["source"]["path"] and content["settings"] else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _where_of_sidecar(self, name: str) -> Place:
        folder, slash, last = name.rpartition("/")
        return self._where / f"{folder}{slash}.{last}.splitscribe.json"

    def _is_there(self, name: str) -> bool:
        path = (self._where / name).path
        return path in self._objects if self._objects is not None else os.path.exists(path)


def names_of(item: Item) -> Iterator[str]:
    """What an item's outputs may be called, the best first, without an end."""
    whole = _short(item.relative)
    stem, _, _ = item.relative.rpartition(".")
    first = _short(stem) if stem and not stem.endswith("/") else whole
    return chain((first, whole), (f"{whole}-{number}" for number in count(2)))


def _short(relative: str) -> str:
    """With names that stay such with a number and a format behind them."""
    parts = relative.split("/")
    return "/".join(part.encode()[:MOST_BYTES].decode(errors="ignore") for part in parts)


def source_of(item: Item) -> dict[str, Any]:
    return {"path": item.key, "size": item.size, "mtime_ns": item.mtime_ns}


def hash_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def transcript_of(content: bytes) -> Transcript:
    """What subtitles and text are written of, from an archive's json."""
    body = json.loads(content)
    segments = tuple(Segment(**{**one, "tokens": tuple(one["tokens"])}) for one in body["segments"])
    return Transcript(body["task"], body["language"], body["duration"], body["text"], segments)


def write_failures(where: Place, failures: Mapping[str, str]) -> None:
    """Write the table of keys and reasons. Raises OSError."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "reason"))
    writer.writerows(sorted((shown(key), reason) for key, reason in failures.items()))
    (where / FAILURES).write_whole(text.getvalue().encode())


def keep_speed(where: Place, hours_per_hour: float) -> None:
    """Leave it for `--dry-run`. Raises OSError."""
    (where / SPEED).write_whole(json.dumps({"hours_per_hour": hours_per_hour}).encode())


def read_speed(where: Place) -> float | None:
    """Hours of audio in an hour, of the last run that did something; None: there was none."""
    try:
        return float(json.loads((where / SPEED).read())["hours_per_hour"])
    except (OSError, ValueError, KeyError):
        return None


@contextmanager
def told(where: Place) -> Iterator[None]:
    """Tell errors of a place by its name."""
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{where.name} cannot be read or written: {error}") from error

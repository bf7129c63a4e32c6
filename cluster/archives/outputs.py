"""The outputs of an archive, and which of its files are done already.

`talk.wav` becomes `talk.srt`; later inputs that would share this name become `talk.wav.srt` and
`talk.wav-2.srt`. An input is done when its sidecar, `.talk.splitscribe.json`, has the same source
and settings and lists all formats. The sidecar is removed before outputs are replaced and written
after them, so it is correct whenever a run is killed.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

from cluster.archives.inputs import Item
from cluster.archives.places import Place, shown
from cluster.common.errors import ConfigurationError, InvalidRequestError, SplitscribeError
from cluster.common.messages import Task
from router.api.params import ResponseFormat, TranscriptionParams
from router.transcript import Transcript

FILES_AT_ONCE = 8
FORMATS: dict[str, ResponseFormat] = {
    "json": "verbose_json",
    "srt": "srt",
    "vtt": "vtt",
    "txt": "text",
}
FAILURES = "failures.csv"
LOCK, SPEED = ".splitscribe.lock", ".splitscribe.speed.json"
MOST_BYTES = 230  # of a part of a name; file systems allow 255, with a sidecar's affixes
READERS = 16  # threads that read sidecars, each of which takes a round trip to a bucket

Fields = Mapping[str, str | Sequence[str]]
Sidecar = Mapping[str, Any]
Result = Transcript | Exception


@dataclass(frozen=True, slots=True)
class Archive:
    where: Place
    fields: Fields = field(default_factory=dict)  # of the file endpoint's form
    task: Task = "transcribe"
    model: str = ""
    formats: tuple[str, ...] = ("json",)
    retry_failed: bool = False
    files_at_once: int = FILES_AT_ONCE

    @property
    def settings(self) -> dict[str, Any]:
        """All settings that change texts; recordings of voices are replaced by their digests."""
        fields = {
            name: _named(value) if isinstance(value, str) else [_named(one) for one in value]
            for name, value in self.fields.items()
        }
        return {"model": self.model, "task": self.task, "fields": fields}


def _named(value: str) -> str:
    """Replace a data URL, which sidecars must not hold, by its digest."""
    if not value.startswith("data:"):
        return value
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"


def pairs_of(fields: Fields) -> tuple[tuple[str, str], ...]:
    return tuple(
        (name, text)
        for name, content in {"model": "whisper-1", **fields}.items()
        for text in ([content] if isinstance(content, str) else content)
    )


@dataclass(frozen=True, slots=True)
class Pending:
    """An item to transcribe. output: the relative path of its outputs without the format."""

    item: Item
    output: str


class Outputs:
    """All outputs of one run. Threads may call `write` at once for different items."""

    def __init__(self, archive: Archive) -> None:
        self._archive, self._where = archive, archive.where
        self._owners: dict[str, str] = {}  # output name -> path of the item of this run that has it
        self._objects: frozenset[str] | None = None
        if not self._where.is_local:  # one listing, not one request for each file
            self._objects = frozenset(one.path for one in self._where.below())

    @classmethod
    @contextmanager
    def opened(cls, archive: Archive) -> Iterator[Self]:
        """Lock the output folder against other runs of this machine; a bucket has no lock.

        Raises InvalidRequestError: another run holds the lock. ConfigurationError: the place is
        unusable.
        """
        where = archive.where
        with ExitStack() as stack:
            with told(where):
                if where.is_local:
                    Path(where.path).mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context(open((where / LOCK).path, "w"))
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        why = f"another run is writing to {where.name}"
                        raise InvalidRequestError(why) from None
                outputs = cls(archive)
            yield outputs

    def look(self, items: Sequence[Item]) -> list[Pending | str | None]:
        """Tell for each item: what to transcribe, None where it is done, or its error message."""
        firsts = list(dict.fromkeys(next(names_of(item)) for item in items))
        with ThreadPoolExecutor(READERS) as threads:
            sidecars = dict(zip(firsts, threads.map(self._sidecar, firsts), strict=True))
        return [self._judge(item, *self._claim(item, sidecars)) for item in items]

    def _claim(self, item: Item, read: Mapping[str, Sidecar | None]) -> tuple[str, Sidecar | None]:
        """Return a name that no other item has, in this run or an earlier one, and its sidecar."""
        for name in names_of(item):
            sidecar = read[name] if name in read else self._sidecar(name)
            owner = item.path if sidecar is None else sidecar["source"]["path"]
            if owner == item.path and self._owners.setdefault(name, item.path) == item.path:
                return name, sidecar
        raise AssertionError("names never end")

    def _judge(self, item: Item, name: str, sidecar: Sidecar | None) -> Pending | str | None:
        pending = Pending(item, name)
        if sidecar is None:
            return pending
        if sidecar["source"] != source_of(item) or sidecar["settings"] != self._archive.settings:
            return pending
        if sidecar["error"] is not None:
            tries = sidecar["may_pass"] or self._archive.retry_failed
            return pending if tries else str(sidecar["error"])
        is_whole = all(
            one in sidecar["written"] and self._is_there(self._where / f"{name}.{one}")
            for one in self._archive.formats
        )
        return None if is_whole else pending

    def write(self, pending: Pending, result: Result) -> None:
        from router.api.formats import render  # late, so that the command line starts quickly

        name, written = pending.output, dict[str, str]()
        sidecar: dict[str, Any] = {"source": source_of(pending.item)}
        if isinstance(result, Exception):
            sidecar |= {"error": error_text(result), "may_pass": may_pass(result)}
        else:
            if self._is_there(before := self._where_of_sidecar(name)):
                before.remove()
            words = "word" in self._archive.fields.get("timestamp_granularities", ())
            for one in self._archive.formats:
                params = TranscriptionParams("", response_format=FORMATS[one], words=words)
                content, _ = render(result, params)
                (self._where / f"{name}.{one}").write_whole(content)
                written[one] = hash_of(content)
            sidecar |= {"duration": result.duration_s, "error": None}
        sidecar |= {"settings": self._archive.settings, "written": written}
        text = json.dumps(sidecar, indent=1)
        self._where_of_sidecar(name).write_whole(text.encode())

    def _sidecar(self, name: str) -> Sidecar | None:
        place = self._where_of_sidecar(name)
        if not self._is_there(place):
            return None
        try:
            content = json.loads(place.read())
            return content if content["source"]["path"] and content["settings"] else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _where_of_sidecar(self, name: str) -> Place:
        folder, slash, last = name.rpartition("/")
        return self._where / f"{folder}{slash}.{last}.splitscribe.json"

    def _is_there(self, place: Place) -> bool:
        return os.path.exists(place.path) if self._objects is None else place.path in self._objects


def names_of(item: Item) -> Iterator[str]:
    whole = _short(item.relative)
    stem, _, _ = item.relative.rpartition(".")
    first = _short(stem) if stem and not stem.endswith("/") else whole
    return chain((first, whole), (f"{whole}-{number}" for number in count(2)))


def _short(relative: str) -> str:
    parts = relative.split("/")
    return "/".join(part.encode()[:MOST_BYTES].decode(errors="ignore") for part in parts)


def source_of(item: Item) -> dict[str, Any]:
    return {"path": item.path, "size": item.size, "mtime_ns": item.mtime_ns}


def hash_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def error_text(error: Exception) -> str:
    text = error.message if isinstance(error, SplitscribeError) else str(error)
    if isinstance(error, FileNotFoundError):
        text = f"there is no such file: {text}"
    return " ".join(text.split()) or type(error).__name__


def may_pass(error: Exception) -> bool:
    """Whether a later try may succeed, because the file itself was not the reason."""
    return not isinstance(error, SplitscribeError) or error.status >= 500


def write_failures(where: Place, failures: Mapping[str, str]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "reason"))
    writer.writerows(sorted((shown(key), reason) for key, reason in failures.items()))
    (where / FAILURES).write_whole(text.getvalue().encode())


@contextmanager
def told(where: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"{where.name} cannot be read or written: {error}") from error

"""What an archive holds: the files that paths, globs, folders, URLs and manifests mean, as items.

A manifest is a list of paths or URLs (JSONL, CSV, Parquet, or a line each from standard input), or
a Parquet file that holds the audio itself. Files are listed and not opened, and no sooner than they
are asked for, so that work on the first begins at once. A path that leads nowhere ends the command
where it was named, and is an item that fails by itself where a manifest lists it.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import posixpath
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from cluster.archives.places import (
    UNKNOWN_BYTES,
    Entry,
    Place,
    in_folder,
    is_url,
    shown,
    split_options,
)
from cluster.common.errors import InvalidRequestError

STDIN = "-"
# Of files in a folder that are taken, with about how many bytes a second of them has: for what goes
# first, and for how much there is before anything was opened.
BYTES_PER_S = {
    **dict.fromkeys(("wav", "aiff", "aif"), 64_000),
    "flac": 40_000,
    **dict.fromkeys(("mp3", "mpga", "aac", "m4a", "m4b", "wma"), 16_000),
    **dict.fromkeys(("opus", "ogg", "oga", "3gp", "amr"), 6_000),
    **dict.fromkeys(("mp4", "m4v", "mkv", "mka", "mov", "mpeg", "mpg", "webm"), 100_000),
}
USUAL_BYTES_PER_S = 20_000
MANIFESTS = (".jsonl", ".ndjson", ".csv", ".parquet")
# What manifests call the column of paths: as people, NeMo and Hugging Face's data sets do.
PATH_COLUMNS = ("path", "file", "url", "audio_filepath", "file_name", "file_path", "audio")
BYTES_COLUMNS = ("bytes", "audio", "content")
ASKED_AT_ONCE = 1000  # files of a list


class Held(NamedTuple):
    """Where a Parquet file has an item's audio. row: of the group."""

    group: int
    row: int
    column: str


@dataclass(frozen=True, slots=True)
class Item:
    """One audio file.

    key: what it is known by: its path, with the number of the row where a Parquet file holds it.
    path: absolute, or a URL. size: bytes, or UNKNOWN_BYTES. mtime_ns: Unix time, or 0.
    relative: its place below what was named, by which its outputs are called.
    """

    key: str
    path: str
    size: int
    mtime_ns: int
    relative: str
    held: Held | None = None

    @property
    def about_s(self) -> float:
        """Seconds of audio, by its size."""
        suffix = self.relative.rpartition(".")[2].lower()
        return max(0, self.size) / BYTES_PER_S.get(suffix, USUAL_BYTES_PER_S)


def check_there(names: Iterable[str]) -> None:
    """Raise InvalidRequestError where a path is not there, before anything large is imported."""
    for name in names:
        is_path = name != STDIN and not is_url(name) and not glob.has_magic(name)
        if is_path and not os.path.lexists(name):
            raise InvalidRequestError(f"there is no file or folder {name}")


def list_items(names: Sequence[str], stdin: Iterable[str] = ()) -> Iterator[Item]:
    """Every item that `names` mean, each once.

    The first of each name is looked for at once, and the others as they are taken.

    stdin: lines of standard input, for the name "-".

    Raises:
        InvalidRequestError: there is nothing of this name, a folder or glob has no audio, or a
            manifest cannot be read; also later, of what cannot be listed.
    """
    listings = []
    for name in names:
        listing = _items(name, stdin)
        listings.append(chain(list(islice(listing, 1)), listing))
    return _each_once(chain.from_iterable(listings))


def _each_once(items: Iterable[Item]) -> Iterator[Item]:
    seen: set[str] = set()
    for item in items:
        if item.key not in seen:
            seen.add(item.key)
            yield item


def _items(name: str, stdin: Iterable[str]) -> Iterator[Item]:
    try:
        if name == STDIN:
            yield from _of_paths(map(_path_of_line, stdin), str(Path.cwd()))
        elif _is_glob(name):
            yield from _of_glob(name)
        elif _is_manifest(name):
            yield from _of_manifest(Place.of(name))
        else:
            yield from _of_file_or_folder(name)
    # pyarrow's errors are ValueErrors, and so is text that is no UTF-8.
    except (OSError, ValueError, NotImplementedError, csv.Error) as error:
        raise InvalidRequestError(f"{name} cannot be read: {error}") from error


def _is_manifest(name: str) -> bool:
    return split_options(name)[0].lower().endswith(MANIFESTS)


def _is_glob(name: str) -> bool:
    """Whether it is one, and not the name of what is there."""
    if not glob.has_magic(split_options(name)[0]):
        return False
    place = Place.of(name)
    return place.entries([place.path])[0].kind == "none"


def _of_file_or_folder(name: str) -> Iterator[Item]:
    place = Place.of(name)
    (entry,) = place.entries([place.path])
    if entry.kind == "none" and place.is_local:
        raise InvalidRequestError(f"there is no file or folder {name}")
    if entry.kind != "folder":
        yield _item(place.name, entry)
        return
    found = False
    for one in place.below():
        if one.path.rpartition(".")[2].lower() in BYTES_PER_S:
            found = True
            yield _item(place.name_of(one.path), one, place.path)
    if not found:
        raise InvalidRequestError(f"there is no audio file in {name}")


def _of_glob(name: str) -> Iterator[Item]:
    """Files that match; of a manifest among them, what it lists."""
    base, options = split_options(name)
    steady = base[: min(base.find(mark) for mark in "*?[" if mark in base)].rpartition("/")[0]
    root = Place.of((steady or ("." if not base.startswith("/") else "/")) + options)
    if root.is_local:
        paths = sorted(str(Path(one).absolute()) for one in glob.iglob(name, recursive=True))
        entries = (root.entries([path])[0] for path in paths)
    else:
        from fsspec.utils import glob_translate

        pattern = re.compile(glob_translate(f"{root.path}/{base[len(steady) + 1 :]}"))
        entries = (one for one in root.below() if pattern.match(one.path))
    found = False
    for one in entries:
        if one.kind != "file":
            continue
        found = True
        named = root.name_of(one.path)
        if _is_manifest(named):
            yield from _of_manifest(Place.of(named))
        else:
            yield _item(named, one, root.path)
    if not found:
        raise InvalidRequestError(f"no file matches {name}")


def _of_manifest(place: Place) -> Iterator[Item]:
    kind = split_options(place.name)[0].rpartition(".")[2].lower()
    if kind == "parquet":
        yield from _of_parquet(place)
        return
    lines = io.StringIO(place.read().decode("utf-8-sig"))
    if kind == "csv":
        rows = csv.DictReader(lines)
        column = _column(place.name, rows.fieldnames or (), PATH_COLUMNS)
        paths = [row[column] for row in rows]
    else:
        paths = [_path_of_line(line) for line in lines]
    yield from _of_paths(paths, place.folder)


def _of_parquet(place: Place) -> Iterator[Item]:
    import pyarrow.parquet as pq
    from pyarrow import types

    with place.files.open_input_file(place.path) as content:
        manifest = pq.ParquetFile(content)
        fields = {field.name: field.type for field in manifest.schema_arrow}
        binary = {
            name
            for name, kind in fields.items()
            if types.is_binary(kind) or types.is_large_binary(kind) or types.is_struct(kind)
        }
        audio = next((name for name in BYTES_COLUMNS if name in binary), None)
        if audio is None:
            column = _column(place.name, [n for n in fields if n not in binary], PATH_COLUMNS)
            for batch in manifest.iter_batches(columns=[column]):
                yield from _of_paths(batch.column(0).to_pylist(), place.folder)
            return
        metadata = manifest.metadata
    (entry,) = place.entries([place.path])
    mean = entry.size // max(1, metadata.num_rows)
    stem = _inside(posixpath.basename(place.path)).rpartition(".")[0]
    rows = (
        (group, row)
        for group in range(metadata.num_row_groups)
        for row in range(metadata.row_group(group).num_rows)
    )
    for number, (group, row) in enumerate(rows):
        key, relative = f"{place.name}#{number}", f"{stem}/{number:06d}"
        yield Item(key, place.name, mean, entry.mtime_ns, relative, Held(group, row, audio))


def _of_paths(paths: Iterable[str | None], folder: str) -> Iterator[Item]:
    """Items of listed paths; those that are not absolute begin in the manifest's folder."""
    named = (path.strip() for path in paths if path and path.strip())
    root = Place.of(folder).path if folder else None
    while some := list(islice(named, ASKED_AT_ONCE)):
        places = []
        for name in some:
            try:
                places.append(Place.of(_beside(folder, name)))
            except InvalidRequestError:  # it fails by itself, later, for this reason
                relative = _inside(posixpath.basename(name))
                yield Item(name, name, UNKNOWN_BYTES, 0, relative)
        for _, group in groupby(places, key=lambda place: place.files):
            same = list(group)  # a bucket is asked for many at a time, not for one after another
            entries = same[0].entries([place.path for place in same])
            for place, entry in zip(same, entries, strict=True):
                yield _item(place.name, entry, root)


def _beside(folder: str, name: str) -> str:
    """A path of a manifest in this folder, which may be one from there."""
    is_whole = is_url(name) or name.startswith(("/", "~"))
    return in_folder(folder, name) if folder and not is_whole else name


def _path_of_line(line: str) -> str:
    """Of a line that is a path, or a JSON object with one; empty where that is null.

    Raises:
        InvalidRequestError: it is an object without any.
    """
    if not line.lstrip().startswith("{"):
        return line
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"this line of the list is no JSON: {line[:200]!r}") from error
    path = row[_column("a line of the list", list(row), PATH_COLUMNS)]
    if path is not None and not isinstance(path, str):
        raise InvalidRequestError(f"this line of the list has no path: {line[:200]!r}")
    return path or ""


def _column(where: str, columns: Sequence[str], known: Sequence[str]) -> str:
    for name in known:
        if name in columns:
            return name
    raise InvalidRequestError(
        f"{where} has no column of paths: it has {', '.join(columns) or 'none'}, and one of "
        f"{', '.join(known)} was looked for"
    )


def _item(name: str, entry: Entry, root: str | None = None) -> Item:
    """root: the folder below which it keeps its folders; None: it is called by its bare name."""
    begin = f"{(root or '').rstrip('/')}/"
    is_below = root is not None and entry.path.startswith(begin)
    relative = entry.path[len(begin) :] if is_below else posixpath.basename(entry.path)
    return Item(name, name, entry.size, entry.mtime_ns, _inside(relative))


def _inside(relative: str) -> str:
    """Without what leads out of a folder, as names of objects may have it, or is no name."""
    parts = shown(relative).replace("\0", "").split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "audio"


@contextmanager
def opened(item: Item) -> Iterator[Path | bytes]:
    """An item's audio: a file of this machine, or bytes where a Parquet file holds them.

    Raises:
        OSError, ValueError, InvalidRequestError: it cannot be had.
    """
    path = item.path
    if item.held is not None:
        group, row, column = item.held
        with _reading:
            value = _group(path, group, column)[row].as_py()
        value = value if isinstance(value, dict) else {"bytes": value}
        if value.get("bytes") is not None or not value.get("path"):
            yield bytes(value.get("bytes") or b"")
            return
        path = _beside(Place.of(path).folder, value["path"])
    with Place.of(path).as_local_file() as file:
        yield file


_reading = threading.Lock()  # or each thread would hold a group of its own, and one may be large


@lru_cache(maxsize=2)  # rows of one group come together
def _group(path: str, group: int, column: str) -> Any:
    import pyarrow.parquet as pq

    place = Place.of(path)
    with place.files.open_input_file(place.path) as content:
        return pq.ParquetFile(content).read_row_group(group, columns=[column]).column(0)

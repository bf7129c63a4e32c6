"""What an archive holds: the files that paths, globs, folders, URLs and manifests mean, as items.

Files are listed and not opened, and no sooner than they are asked for, so that work on the first
begins at once. A path that leads nowhere ends the command where it was named, and is an item that
fails by itself where a manifest lists it.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from cluster.archives.places import UNKNOWN_BYTES, Entry, Place, is_url, shown
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
ASKED_AT_ONCE = 1000  # files of a list


@dataclass(frozen=True, slots=True)
class Item:
    """One audio file.

    path: absolute, or a URL, by which it is known. size: bytes, or UNKNOWN_BYTES. mtime_ns: Unix
    time, or 0. relative: its place below what was named, by which its outputs are called.
    """

    path: str
    size: int
    mtime_ns: int
    relative: str

    @property
    def about_s(self) -> float:
        suffix = self.relative.rpartition(".")[2].lower()
        return max(0, self.size) / BYTES_PER_S.get(suffix, USUAL_BYTES_PER_S)


def check_there(names: Iterable[str]) -> None:
    """Raise InvalidRequestError where a path is not there, before anything large is imported."""
    for name in names:
        is_path = name != STDIN and not is_url(name) and not glob.has_magic(name)
        if is_path and not os.path.lexists(name):
            raise InvalidRequestError(f"there is no file or folder {name}")


def list_items(names: Sequence[str], stdin: Iterable[str] = ()) -> Iterator[Item]:
    """Every item that `names` mean, each once; `stdin`: lines for the name "-".

    The first of each name is looked for at once, and the others as they are taken. Raises
    InvalidRequestError, also later: nothing is there, a folder or glob has no audio, a list cannot
    be read.
    """
    listings = []
    for name in names:
        listing = _items(name, stdin)
        listings.append(chain(list(islice(listing, 1)), listing))
    return _each_once(chain.from_iterable(listings))


def _each_once(items: Iterable[Item]) -> Iterator[Item]:
    seen: set[str] = set()
    for item in items:
        if item.path not in seen:
            seen.add(item.path)
            yield item


def _items(name: str, stdin: Iterable[str]) -> Iterator[Item]:
    try:
        if name == STDIN:
            yield from _of_paths(map(_path_of_line, stdin), Place.of("."))
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
    return name.lower().endswith(MANIFESTS)


def _is_glob(name: str) -> bool:
    """Whether it is one, and not the name of what is there."""
    if not glob.has_magic(name):
        return False
    place = Place.of(name)
    return place.entries([place.path])[0].kind == "none"


def _of_file_or_folder(name: str) -> Iterator[Item]:
    place = Place.of(name)
    (entry,) = place.entries([place.path])
    if entry.kind == "none" and place.is_local:
        raise InvalidRequestError(f"there is no file or folder {name}")
    if entry.kind != "folder":
        yield _item(place, entry)
        return
    found = False
    for one in place.below():
        if one.path.rpartition(".")[2].lower() in BYTES_PER_S:
            found = True
            yield _item(place.at(one.path), one, place)
    if not found:
        raise InvalidRequestError(f"there is no audio file in {name}")


def _of_glob(name: str) -> Iterator[Item]:
    steady = name[: min(name.find(mark) for mark in "*?[" if mark in name)].rpartition("/")[0]
    root = Place.of(steady or ("/" if name.startswith("/") else "."))
    if root.is_local:
        paths = sorted(str(Path(one).absolute()) for one in glob.iglob(name, recursive=True))
        entries = (root.entries([path])[0] for path in paths)
    else:
        from fsspec.utils import glob_translate

        pattern = re.compile(glob_translate(f"{root.path}/{name[len(steady) + 1 :]}"))
        entries = (one for one in root.below() if pattern.match(one.path))
    found = False
    for one in entries:
        if one.kind != "file":
            continue
        found = True
        if _is_manifest(one.path):
            yield from _of_manifest(root.at(one.path))
        else:
            yield _item(root.at(one.path), one, root)
    if not found:
        raise InvalidRequestError(f"no file matches {name}")


def _of_manifest(place: Place) -> Iterator[Item]:
    kind = place.path.rpartition(".")[2].lower()
    content = place.read()
    paths: Iterable[str | None]
    if kind == "parquet":
        import pyarrow.parquet as pq

        manifest = pq.ParquetFile(io.BytesIO(content))
        column = _column(place.name, manifest.schema_arrow.names)
        paths = manifest.read(columns=[column]).column(0).to_pylist()
    elif kind == "csv":
        rows = csv.DictReader(io.StringIO(content.decode("utf-8-sig")))
        column = _column(place.name, rows.fieldnames or ())
        paths = [row[column] for row in rows]
    else:
        paths = map(_path_of_line, io.StringIO(content.decode("utf-8-sig")))
    yield from _of_paths(paths, place.folder)


def _of_paths(paths: Iterable[Any], folder: Place) -> Iterator[Item]:
    named = (path.strip() for path in map(_checked, paths) if path.strip())
    while some := list(islice(named, ASKED_AT_ONCE)):
        places = []
        for name in some:
            is_whole = is_url(name) or name.startswith(("/", "~"))
            try:
                places.append(Place.of(name if is_whole else (folder / name).name))
            except InvalidRequestError:  # it fails by itself, later, for this reason
                yield Item(name, UNKNOWN_BYTES, 0, _inside(posixpath.basename(name)))
        for _, group in groupby(places, key=lambda place: place.files):
            same = list(group)  # a bucket is asked for many at a time, not for one after another
            entries = same[0].entries([place.path for place in same])
            for place, entry in zip(same, entries, strict=True):
                yield _item(place, entry, folder)


def _path_of_line(line: str) -> Any:
    """Of a line that is a path, or a JSON object with one."""
    if not line.lstrip().startswith("{"):
        return line
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"this line of the list is no JSON: {line[:200]!r}") from error
    return row[_column("a line of the list", list(row))]


def _checked(path: Any) -> str:
    if path is not None and not isinstance(path, str):
        raise InvalidRequestError(
            f"a row of the list has no path, but {type(path).__name__}: audio inside of Parquet "
            "files goes through Ray Data (configs/README.md, Transcribe archives)"
        )
    return path or ""


def _column(where: str, columns: Sequence[str]) -> str:
    for name in PATH_COLUMNS:
        if name in columns:
            return name
    raise InvalidRequestError(
        f"{where} has no column of paths: it has {', '.join(columns) or 'none'}, and one of "
        f"{', '.join(PATH_COLUMNS)} was looked for"
    )


def _item(place: Place, entry: Entry, root: Place | None = None) -> Item:
    """root: the folder below which it keeps its folders; None: it is called by its bare name."""
    begin = f"{root.path.rstrip('/')}/" if root else "/"
    is_below = root is not None and entry.path.startswith(begin)
    relative = entry.path[len(begin) :] if is_below else posixpath.basename(entry.path)
    return Item(place.name, entry.size, entry.mtime_ns, _inside(relative))


def _inside(relative: str) -> str:
    """Without what leads out of a folder, as names of objects may have it, or is no name."""
    parts = shown(relative).replace("\0", "").split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "audio"

"""List the audio files that paths, globs, folders, URLs and manifests name.

Files are listed lazily and not opened. A path on the command line that does not exist is an error;
one in a manifest is an item that fails later.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from cluster.archives.places import Place, is_url, shown
from cluster.common.errors import InvalidRequestError

STDIN = "-"
# The suffixes that count as audio in a folder, and about how many bytes a second of each has. From
# these rates come the order of files and the first estimate of an archive's duration.
BYTES_PER_S = {
    **dict.fromkeys(("wav", "aiff", "aif"), 64_000),
    "flac": 40_000,
    **dict.fromkeys(("mp3", "mpga", "aac", "m4a", "m4b", "wma"), 16_000),
    **dict.fromkeys(("opus", "ogg", "oga", "3gp", "amr"), 6_000),
    **dict.fromkeys(("mp4", "m4v", "mkv", "mka", "mov", "mpeg", "mpg", "webm"), 100_000),
}
USUAL_BYTES_PER_S = 20_000
MANIFESTS = (".jsonl", ".ndjson", ".csv", ".parquet")
# Names of the column of paths, including those of NeMo and Hugging Face's data sets.
PATH_COLUMNS = ("path", "file", "url", "audio_filepath", "file_name", "file_path", "audio")
ASKED_AT_ONCE = 32  # files of a list whose size is asked for in parallel


@dataclass(frozen=True, slots=True)
class Item:
    """path: absolute, or a URL. size (bytes) and mtime_ns (Unix time) are 0 where unknown.
    relative: the path below the folder that was named, which names the outputs.
    """

    path: str
    size: int
    mtime_ns: int
    relative: str

    @property
    def about_s(self) -> float:
        return self.size / BYTES_PER_S.get(_suffix(self.relative), USUAL_BYTES_PER_S)


def list_items(names: Sequence[str], stdin: Iterable[str] = ()) -> Iterator[Item]:
    """Yield each audio file that `names` mean once; `stdin` holds the lines for the name "-".

    Raises InvalidRequestError, at once or while iterating: nothing is there, a folder or glob has
    no audio, or a list cannot be read.
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
            yield from _of_rows(stdin, Place.of("."), "a line of the list")
            return
        root, files = _found(name)
        for file in files:
            if file.path.lower().endswith(MANIFESTS):
                yield from _of_manifest(file)
            else:
                yield _item(file, root)
    # pyarrow's errors are ValueErrors, and so is UnicodeDecodeError.
    except (OSError, ValueError, NotImplementedError, csv.Error) as error:
        raise InvalidRequestError(f"{name} cannot be read: {error}") from error


def _found(name: str) -> tuple[Place, Iterable[Place]]:
    place = Place.of(name).looked_at()
    if place.kind == "Directory":
        audio = (file for file in place.below() if _suffix(file.path) in BYTES_PER_S)
        return place, _some(audio, f"there is no audio file in {name}")
    if place.kind == "NotFound" and glob.has_magic(name):  # an existing file may have such a name
        root, matches = _matches(name)
        return root, _some(matches, f"no file matches {name}")
    if place.kind == "NotFound" and place.is_local:
        raise InvalidRequestError(f"there is no file or folder {name}")
    return place.folder, (place,)


def _matches(name: str) -> tuple[Place, Iterator[Place]]:
    steady = name[: min(name.find(mark) for mark in "*?[" if mark in name)].rpartition("/")[0]
    root = Place.of(steady or ("/" if name.startswith("/") else "."))
    if root.is_local:
        paths = (str(Path(one).absolute()) for one in sorted(glob.iglob(name, recursive=True)))
        places = (Place(path, path).looked_at() for path in paths)
        return root, (one for one in places if one.kind == "File")
    from fsspec.utils import glob_translate

    pattern = re.compile(glob_translate(f"{root.path}/{name[len(steady) + 1 :]}"))
    return root, (one for one in root.below() if pattern.match(one.path))


def _some(files: Iterator[Place], or_else: str) -> Iterator[Place]:
    first = next(files, None)
    if first is None:
        raise InvalidRequestError(or_else)
    return chain((first,), files)


def _of_manifest(place: Place) -> Iterator[Item]:
    kind, content = _suffix(place.path), place.read()
    if kind == "parquet":
        import pyarrow.parquet as pq

        table = pq.ParquetFile(io.BytesIO(content))
        column = _column(table.schema_arrow.names, place.name)
        rows: Iterable[Any] = table.read(columns=[column]).to_pylist()
    else:
        rows = io.StringIO(content.decode("utf-8-sig"))
        rows = csv.DictReader(rows) if kind == "csv" else rows
    yield from _of_rows(rows, place.folder, place.name)


def _of_rows(rows: Iterable[Any], folder: Place, where: str) -> Iterator[Item]:
    named = filter(None, (_path(row, where) for row in rows))
    with ThreadPoolExecutor(ASKED_AT_ONCE) as threads:
        while some := list(islice(named, ASKED_AT_ONCE)):
            yield from threads.map(partial(_of_row, folder=folder), some)


def _of_row(name: str, folder: Place) -> Item:
    is_whole = is_url(name) or name.startswith(("/", "~"))
    try:
        place = Place.of(name if is_whole else (folder / name).name)
    except InvalidRequestError:  # opening it later fails with the same error
        return Item(name, 0, 0, _inside(posixpath.basename(name)))
    return _item(place.looked_at(), folder)


def _path(row: Any, where: str) -> str:
    if isinstance(row, str) and row.lstrip().startswith("{"):
        try:
            row = json.loads(row)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"a line of the list is not JSON: {row[:200]!r}") from error
    path = row[_column(row, where)] if isinstance(row, dict) else row
    if path is not None and not isinstance(path, str):
        raise InvalidRequestError(
            f"a row of the list has {type(path).__name__} in place of a path: audio inside Parquet "
            "files goes through Ray Data (configs/README.md, Transcribe archives)"
        )
    return (path or "").strip()


def _column(columns: Collection[str], where: str) -> str:
    for name in PATH_COLUMNS:
        if name in columns:
            return name
    has = ", ".join(map(str, columns)) or "none"
    raise InvalidRequestError(
        f"{where} has no column of paths, which may be called {', '.join(PATH_COLUMNS)}; it has: "
        f"{has}"
    )


def _item(file: Place, root: Place) -> Item:
    below = f"{root.path.rstrip('/')}/"
    path = file.path
    relative = path[len(below) :] if path.startswith(below) else posixpath.basename(path)
    return Item(file.name, file.size, file.mtime_ns, _inside(relative))


def _inside(relative: str) -> str:
    """Drop from a relative path what would lead out of a folder, such as `..`."""
    parts = shown(relative).replace("\0", "").split("/")
    return "/".join(part for part in parts if part not in ("", ".", "..")) or "audio"


def _suffix(path: str) -> str:
    return path.rpartition(".")[2].lower()

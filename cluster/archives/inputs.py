"""What an archive holds: the files that paths, globs, folders, URLs and manifests mean, as items.

A manifest is a list of paths or URLs (JSONL, CSV, Parquet, or a line each from standard input), or
a Parquet file that holds the audio itself. Files are listed and not opened, so that a bucket of a
million costs a listing. A path that leads nowhere is an item too, and fails with the others.
"""

from __future__ import annotations

import csv
import glob
import io
import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from cluster.archives.local_files import shown
from cluster.archives.places import Place, in_folder, is_url, split_options
from cluster.errors import InvalidRequestError

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
UNKNOWN_BYTES = -1
ASKED_AT_ONCE = 1000  # files of a list


@dataclass(frozen=True, slots=True)
class Item:
    """One audio file.

    path: absolute, or a URL; of a Parquet file that holds audio, the file's. size: bytes, or
    UNKNOWN_BYTES where there is nothing or nobody says. mtime_ns: Unix time, or 0. relative: its
    place below what was named, by which its outputs are called. row: of a Parquet file that holds
    the audio, in `column`; -1: the file is the audio.
    """

    path: str
    size: int
    mtime_ns: int
    relative: str
    row: int = -1
    column: str = ""

    @property
    def key(self) -> str:
        """What it is known by in the ledger."""
        return self.path if self.row < 0 else f"{self.path}#{self.row}"

    @property
    def about_s(self) -> float:
        """Seconds of audio, by its size."""
        suffix = self.relative.rpartition(".")[2].lower()
        return max(0, self.size) / BYTES_PER_S.get(suffix, USUAL_BYTES_PER_S)


def list_items(names: Sequence[str], stdin: Iterable[str] = ()) -> list[Item]:
    """Every item that `names` mean, each once.

    stdin: lines of standard input, for the name "-".

    Raises:
        InvalidRequestError: a folder or glob has no audio, or a manifest cannot be read.
    """
    found: dict[str, Item] = {}
    for name in names:
        for item in _items(name, stdin):
            found.setdefault(item.key, item)
    return list(found.values())


def _items(name: str, stdin: Iterable[str]) -> Iterator[Item]:
    try:
        if name == STDIN:
            yield from _of_paths((_path_of_line(line) for line in stdin), "")
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
    from pyarrow.fs import FileType

    magic = glob.has_magic(split_options(name)[0])
    return magic and Place.of(name).info().type == FileType.NotFound


def _of_file_or_folder(name: str) -> Iterator[Item]:
    from pyarrow.fs import FileType

    place = Place.of(name)
    info = place.info()
    if info.type != FileType.Directory:
        yield _item(place.name, info, posixpath.basename(place.path))
        return
    count = 0
    for one in place.below(recursive=True):
        if one.path.rpartition(".")[2].lower() in BYTES_PER_S:
            count += 1
            yield _item(
                place.name_of(one.path), one, posixpath.relpath(one.path, shown(place.path))
            )
    if not count:
        raise InvalidRequestError(f"there is no audio file in {name}")


def _of_glob(name: str) -> Iterator[Item]:
    """Files that match; of a manifest among them, what it lists."""
    base, options = split_options(name)
    steady = base[: min(base.find(mark) for mark in "*?[" if mark in base)].rpartition("/")[0]
    root = Place.of((steady or ("." if not base.startswith("/") else "/")) + options)
    if root.is_local:
        paths = sorted(str(Path(one).absolute()) for one in glob.glob(name, recursive=True))
        files = [one for one in root.infos(paths) if one.is_file]
    else:
        from fsspec.utils import glob_translate

        pattern = re.compile(glob_translate(f"{root.path}/{base[len(steady) + 1 :]}"))
        files = [one for one in root.below(recursive=True) if pattern.match(one.path)]
    if not files:
        raise InvalidRequestError(f"no file matches {name}")
    for one in files:
        named = root.name_of(one.path)
        if _is_manifest(named):
            yield from _of_manifest(Place.of(named))
        else:
            yield _item(named, one, posixpath.relpath(one.path, shown(root.path)))


def _of_manifest(place: Place) -> Iterator[Item]:
    kind = split_options(place.name)[0].rpartition(".")[2].lower()
    if kind == "parquet":
        yield from _of_parquet(place)
        return
    lines = io.StringIO(place.read().decode("utf-8-sig"))
    if kind == "csv":
        rows = csv.DictReader(lines)
        column = _column(place.name, rows.fieldnames or (), PATH_COLUMNS)
        yield from _of_paths((row[column] for row in rows), place.folder)
    else:
        yield from _of_paths((_path_of_line(line) for line in lines), place.folder)


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
        info, stem = place.info(), posixpath.basename(place.path).rpartition(".")[0]
        mean = info.size // max(1, manifest.metadata.num_rows)
        for row in range(manifest.metadata.num_rows):
            relative = f"{stem}/{row:06d}"
            yield Item(place.name, mean, info.mtime_ns or 0, relative, row, audio)


def _of_paths(paths: Iterable[str | None], folder: str) -> Iterator[Item]:
    """Items of listed paths; those that are not absolute begin in the manifest's folder."""
    named = (path.strip() for path in paths if path and path.strip())
    while some := list(islice(named, ASKED_AT_ONCE)):
        places = []
        for name in some:
            try:
                places.append(Place.of(beside(folder, name)))
            except InvalidRequestError:  # it fails by itself, later, for this reason
                yield Item(shown(name), UNKNOWN_BYTES, 0, shown(posixpath.basename(name)))
        for _, group in groupby(places, key=lambda place: place.files):
            same = list(group)  # a bucket is asked for many at a time, not for one after another
            infos = same[0].infos([place.path for place in same])
            for place, info in zip(same, infos, strict=True):
                yield _item(place.name, info, _below(place, folder))


def beside(folder: str, name: str) -> str:
    """A path of a manifest in this folder, which may be one from there."""
    is_whole = is_url(name) or name.startswith(("/", "~"))
    return in_folder(folder, name) if folder and not is_whole else name


def _below(place: Place, folder: str) -> str:
    """The place within the manifest's folder; its bare name where it is elsewhere."""
    base, root = split_options(place.name)[0], split_options(folder)[0]
    inside = root and base.startswith(f"{root}/")
    relative = base.removeprefix(f"{root}/") if inside else ""
    return (
        relative if relative and ".." not in relative.split("/") else posixpath.basename(place.path)
    )


def _path_of_line(line: str) -> str:
    """Of a line that is a path, or a JSON object with one; empty where that is null.

    Raises:
        InvalidRequestError: it is an object without any.
    """
    if not line.lstrip().startswith("{"):
        return line
    try:
        row: Any = json.loads(line)
    except ValueError as error:
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


def _item(name: str, info: Any, relative: str) -> Item:
    size = UNKNOWN_BYTES if info.size is None else info.size
    return Item(shown(name), size, info.mtime_ns or 0, shown(relative))

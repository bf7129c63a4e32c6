"""Files and folders of this machine, in buckets, and in any filesystem of fsspec."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from cluster.common.errors import InvalidRequestError

URL = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
BUCKETS = ("s3", "gs", "gcs")
GOOGLE_WAIT_S = 60  # pyarrow waits 15 minutes where there are no credentials
CHUNK_BYTES = 2**20
Kind = Literal["File", "Directory", "NotFound", "Unknown"]  # as pyarrow calls them


def is_url(name: str) -> bool:
    return URL.match(name) is not None


def shown(path: str) -> str:
    """A path as it is printed and stored: bytes that are not UTF-8 appear as `\\x..`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder; files: pyarrow's filesystem that `path` belongs to, None for this machine.

    `looked_at` and `below` set kind, size (bytes) and mtime_ns (Unix time), which are 0 where
    unknown.
    """

    path: str
    name: str  # the URL; on this machine the path
    files: Any = None
    kind: Kind = "Unknown"
    size: int = 0
    mtime_ns: int = 0

    @classmethod
    def of(cls, name: str) -> Place:
        if name.startswith("file:///"):  # local outputs are locked and replaced atomically
            name = unquote(name.removeprefix("file://"))
        if not is_url(name):
            path = str(Path(os.path.expanduser(name)).absolute())
            return cls(path, path)
        files, path = _opened(name)
        return cls(path.rstrip("/"), name.rstrip("/"), files)

    @property
    def is_local(self) -> bool:
        return self.files is None

    @property
    def folder(self) -> Place:
        return Place(self.path.rpartition("/")[0], self.name.rpartition("/")[0], self.files)

    def __truediv__(self, below: str) -> Place:
        return Place(f"{self.path}/{below}", f"{self.name}/{below}", self.files)

    def read(self) -> bytes:
        if self.is_local:
            return Path(self.path).read_bytes()
        with self.files.open_input_stream(self.path) as content:
            return bytes(content.read())

    @contextmanager
    def as_local_file(self) -> Iterator[Path]:
        """Open the file on this machine; a remote one is copied for as long as it is open.

        Raises InvalidRequestError: its name is not UTF-8, which audio workers and sidecars need.
        """
        if self.is_local:
            if shown(self.path) != self.path:
                raise InvalidRequestError(
                    f"the name of {shown(self.path)} is not UTF-8: rename the file"
                )
            with open(self.path, "rb"):  # raise here, not in a worker
                yield Path(self.path)
            return
        from router.audio.protocol import path_of  # late, so that the command line starts quickly

        with tempfile.TemporaryFile() as copy:  # unnamed, so that a killed run leaves nothing
            with self.files.open_input_stream(self.path) as content:
                shutil.copyfileobj(content, copy, CHUNK_BYTES)
            copy.flush()
            yield path_of(copy.fileno())

    def write_whole(self, content: bytes) -> None:
        """Replace the file so that a reader finds all of the old or all of the new content."""
        folder = self.path.rpartition("/")[0]
        if not self.is_local:  # an object appears when it is whole
            with suppress(OSError, NotImplementedError):
                self.files.create_dir(folder, recursive=True)
            with self.files.open_output_stream(self.path) as target:
                target.write(content)
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        draft = Path(folder, f".{uuid.uuid4().hex}.tmp")
        try:
            with draft.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            if self.is_local:
                os.unlink(self.path)
            else:
                self.files.delete_file(self.path)

    def looked_at(self) -> Place:
        if self.is_local:
            return _local(self.path)
        return self._of_info(self.files.get_file_info(self.path))

    def below(self) -> Iterator[Place]:
        """Yield each file below this folder in order; none where the folder is missing."""
        if self.is_local:
            yield from _local_files(self.path)
            return
        from pyarrow.fs import FileSelector

        every = FileSelector(self.path, recursive=True, allow_not_found=True)
        found = map(self._of_info, self.files.get_file_info(every))
        yield from sorted((one for one in found if one.kind == "File"), key=lambda one: one.path)

    def _of_info(self, info: Any) -> Place:
        name = self.name + info.path[len(self.path) :]
        found = info.type.name, info.size or 0, info.mtime_ns or 0
        return Place(info.path, name, self.files, *found)


def _local(path: str) -> Place:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        is_gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return Place(path, path, kind="NotFound" if is_gone else "Unknown")
    kind: Kind = "Directory" if stat.S_ISDIR(found.st_mode) else "File"
    return Place(path, path, None, kind, found.st_size, found.st_mtime_ns)


def _local_files(folder: str) -> Iterator[Place]:
    seen: set[tuple[int, int]] = set()  # symbolic links may form cycles
    for root, folders, names in os.walk(folder, onerror=_raise_unless_gone, followlinks=True):
        found = os.stat(root)
        if (found.st_dev, found.st_ino) in seen:
            folders.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        folders.sort()
        files = (_local(os.path.join(root, name)) for name in sorted(names))
        yield from (one for one in files if one.kind == "File")


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _opened(url: str) -> tuple[Any, str]:
    scheme, rest = url.split("://", 1)
    try:
        if scheme in BUCKETS:
            bucket, slash, path = rest.partition("/")
            wait = "" if scheme == "s3" else f"?retry_limit_seconds={GOOGLE_WAIT_S}"
            files, root = _filesystem(f"{scheme}://{bucket}{wait}")
            return files, f"{root}{slash}{path}"
        if scheme in ("hdfs", "abfs", "abfss"):
            return _filesystem(url)
        import fsspec
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        files = fsspec.filesystem(scheme)
        return PyFileSystem(FSSpecHandler(files)), str(files._strip_protocol(url))
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        raise InvalidRequestError(f"{url} cannot be opened: {error}") from error


@lru_cache(maxsize=64)
def _filesystem(uri: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    return FileSystem.from_uri(uri)  # type: ignore[no-any-return]

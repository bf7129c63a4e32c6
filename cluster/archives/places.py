"""Where archives and their transcripts are: folders of this machine, buckets, anything of fsspec.

pyarrow's own filesystems are asked first, with the credentials that they find, then fsspec's.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from cluster.common.errors import ConfigurationError, InvalidRequestError
from cluster.common.extras import install_command

URL = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
BUCKETS = ("s3", "gs", "gcs")
GOOGLE_WAIT_S = 60  # pyarrow's own is 15 minutes, without a word, where there are no credentials
CHUNK_BYTES = 2**20
UNKNOWN_BYTES = -1
Kind = Literal["file", "folder", "none", "other"]
REMEDY = f"archives need more packages: {install_command('bulk')}"


def require_bulk() -> None:
    for name in ("fsspec", "pandas", "pyarrow"):  # not imported: pandas takes half a second
        if find_spec(name) is None:
            raise ConfigurationError(f"{REMEDY} (there is no {name})")


def is_url(name: str) -> bool:
    return URL.match(name) is not None


def shown(path: str) -> str:
    """A path as it is printed and kept: bytes that are not UTF-8 appear as `\\x..`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class Entry:
    """size: bytes, or UNKNOWN_BYTES where nobody says. mtime_ns: Unix time, or 0."""

    path: str
    kind: Kind
    size: int = UNKNOWN_BYTES
    mtime_ns: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder of a filesystem.

    files: pyarrow's filesystem; None: this machine, where paths are absolute. scheme: what stands
    before the path in the name. unnamed: the beginning of the path that is not in the name, such as
    the container of an `abfs` URL.
    """

    path: str
    files: Any = None
    scheme: str = ""
    unnamed: str = ""

    @classmethod
    def of(cls, name: str) -> Place:
        if not is_url(name) or name.startswith("file://"):
            return cls(_local_path(name))
        files, path = _opened(name)
        base, path = name.rstrip("/"), path.rstrip("/")
        ends = zip(reversed(base), reversed(path), strict=False)
        n_same = len(list(takewhile(lambda pair: pair[0] == pair[1], ends)))
        return cls(path, files, base[: len(base) - n_same], path[: len(path) - n_same])

    @property
    def name(self) -> str:
        return self.scheme + self.path.removeprefix(self.unnamed)

    @property
    def is_local(self) -> bool:
        return self.files is None

    @property
    def folder(self) -> Place:
        return self.at(self.path.rpartition("/")[0])

    def at(self, path: str) -> Place:
        return replace(self, path=path)

    def __truediv__(self, below: str) -> Place:
        return self.at(f"{self.path}/{below}")

    def read(self) -> bytes:
        if self.is_local:
            return Path(self.path).read_bytes()
        with self.files.open_input_stream(self.path) as content:
            return bytes(content.read())

    @contextmanager
    def as_local_file(self) -> Iterator[Path]:
        """The file on this machine; what is elsewhere is copied, and the copy goes at the end.

        Raises InvalidRequestError: its name is not UTF-8, as audio workers and sidecars have it.
        """
        if self.is_local:
            if shown(self.path) != self.path:
                raise InvalidRequestError(
                    f"the name of {shown(self.path)} is not UTF-8: rename the file"
                )
            with open(self.path, "rb"):  # before a worker is asked
                yield Path(self.path)
            return
        with tempfile.NamedTemporaryFile(prefix="splitscribe-bulk-") as copy:
            with self.files.open_input_stream(self.path) as content:
                while piece := content.read(CHUNK_BYTES):
                    copy.write(piece)
            copy.flush()
            yield Path(copy.name)

    def write_whole(self, content: bytes) -> None:
        """Write so that a reader finds all of it or what was there before."""
        folder = self.path.rpartition("/")[0]
        if not self.is_local:  # an object appears when it is whole
            with suppress(OSError, NotImplementedError):
                self.files.create_dir(folder, recursive=True)
            with self.files.open_output_stream(self.path) as target:
                target.write(content)
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        name = hashlib.blake2b(os.fsencode(self.path), digest_size=8).hexdigest()
        draft = f"{folder}/.{name}.{os.getpid()}.tmp"  # its own may be as long as names can be
        try:
            with open(draft, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, self.path)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft)
            raise

    def remove(self) -> None:
        if self.is_local:
            os.unlink(self.path)
        else:
            self.files.delete_file(self.path)

    def entries(self, paths: list[str]) -> list[Entry]:
        if self.is_local:
            return list(map(_local_entry, paths))
        return list(map(_entry_of, self.files.get_file_info(paths)))

    def below(self) -> Iterator[Entry]:
        """Each file in this folder, at any depth; none where it is not there. A bucket is listed
        once.
        """
        if self.is_local:
            yield from _local_files(self.path)
            return
        from pyarrow.fs import FileSelector

        every = FileSelector(self.path, recursive=True, allow_not_found=True)
        found = map(_entry_of, self.files.get_file_info(every))
        yield from sorted((one for one in found if one.kind == "file"), key=lambda one: one.path)


def _local_path(name: str) -> str:
    """Absolute. Raises InvalidRequestError: a file URL of another machine, the home of nobody."""
    if not name.startswith("file://"):
        try:
            return str(Path(name).expanduser().absolute())
        except RuntimeError as error:
            raise InvalidRequestError(f"{name} begins with the home of an unknown user") from error
    parts = urlsplit(name)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidRequestError(f"{name} names no file of this machine: write file:///PATH")
    return str(Path(unquote(parts.path)).absolute())


def _local_entry(path: str) -> Entry:
    try:
        found = os.stat(path)
    except (OSError, ValueError) as error:
        is_gone = isinstance(error, (FileNotFoundError, NotADirectoryError))
        return Entry(path, "none" if is_gone else "other")
    if stat.S_ISDIR(found.st_mode):
        return Entry(path, "folder")
    return Entry(path, "file", found.st_size, found.st_mtime_ns)


def _local_files(folder: str) -> Iterator[Entry]:
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    for root, folders, names in os.walk(folder, onerror=_raise_unless_gone, followlinks=True):
        found = os.stat(root)
        if (found.st_dev, found.st_ino) in seen:
            folders.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        folders.sort()
        entries = (_local_entry(os.path.join(root, name)) for name in sorted(names))
        yield from (one for one in entries if one.kind == "file")


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _entry_of(info: Any) -> Entry:
    from pyarrow.fs import FileType

    kinds: dict[Any, Kind] = {
        FileType.File: "file",
        FileType.Directory: "folder",
        FileType.NotFound: "none",
    }
    size = UNKNOWN_BYTES if info.size is None else info.size
    return Entry(info.path, kinds.get(info.type, "other"), size, info.mtime_ns or 0)


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

        files, _ = _filesystem(f"{scheme}://")
        return files, str(fsspec.get_filesystem_class(scheme)._strip_protocol(url))
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        raise InvalidRequestError(f"{url} cannot be opened: {error}") from error


@lru_cache(maxsize=64)
def _filesystem(url: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    if not url.endswith("://"):
        return FileSystem.from_uri(url)  # type: ignore[no-any-return]
    import fsspec

    return PyFileSystem(FSSpecHandler(fsspec.filesystem(url.removesuffix("://")))), ""

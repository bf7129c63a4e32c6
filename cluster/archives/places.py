"""Where archives and their transcripts are: folders of this machine, buckets, anything of fsspec.

A place is named as people write it: a path, or a URL such as `s3://bucket/talks`. pyarrow's own
filesystems are asked first, with the credentials that they find, and fsspec's for the rest. Knows
bytes and names, nothing of audio.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster.archives.local_files import file_info, files_below
from cluster.errors import ConfigurationError, InvalidRequestError

URL = re.compile(r"^([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
# pyarrow's, at the end of a bucket's URL, as in ?region=eu-west-1. Names of objects may have a "?".
OPTIONS = re.compile(r"\?[a-z_]+=[^?]*$")
BUCKETS = ("s3", "gs", "gcs")
GOOGLE_WAIT_S = 60  # pyarrow's own is 15 minutes, without a word, where there are no credentials
REMEDY = "archives need more packages: pip install 'splitscribe[bulk]'"


def require_bulk() -> None:
    """Raises ConfigurationError: the packages of the extra `bulk` are not installed."""
    try:
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(f"{REMEDY} ({error})") from error


def is_url(name: str) -> bool:
    return URL.match(name) is not None


@dataclass(frozen=True, slots=True)
class Place:
    """A file or folder of a filesystem.

    name: as people know it: absolute, or a URL. files: pyarrow's filesystem. path: within it.
    """

    name: str
    files: Any
    path: str

    @classmethod
    def of(cls, name: str) -> Place:
        """The place that a path or URL means.

        Raises:
            InvalidRequestError: nobody knows its filesystem.
        """
        if not is_url(name) or name.startswith("file://"):
            local = _local_path(name)
            return cls(local, _filesystem("file"), local)
        base, options = split_options(name)
        files, path = _opened(base, options)
        return cls(base.rstrip("/") + options, files, path.rstrip("/"))

    @property
    def is_local(self) -> bool:
        return str(self.files.type_name) == "local"

    @property
    def local(self) -> Path:
        """The path, where it is of this machine."""
        return Path(self.path)

    @property
    def folder(self) -> str:
        """The name of the folder that it is in."""
        base, options = split_options(self.name)
        return base.rpartition("/")[0] + options

    def __truediv__(self, below: str) -> Place:
        return Place(in_folder(self.name, below), self.files, f"{self.path}/{below}")

    def read(self) -> bytes:
        """Raises OSError."""
        with self.files.open_input_stream(self.path) as content:
            return bytes(content.read())

    def write_whole(self, content: bytes) -> None:
        """Write so that a reader finds all of it or what was there before. Raises OSError."""
        folder = self.path.rpartition("/")[0]
        if not self.is_local:  # an object appears when it is whole
            with contextlib.suppress(OSError, NotImplementedError):
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
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    def remove(self) -> None:
        """Raises OSError, also where there is none."""
        self.files.delete_file(self.path)

    def info(self) -> Any:
        """pyarrow's FileInfo. Raises OSError where the filesystem cannot be asked."""
        return self.infos([self.path])[0]

    def infos(self, paths: list[str]) -> list[Any]:
        """pyarrow's FileInfo of each of these paths in the same filesystem. Raises OSError."""
        if self.is_local:
            return list(map(file_info, paths))
        return list(self.files.get_file_info(paths))

    def below(self, *, recursive: bool = False) -> list[Any]:
        """pyarrow's FileInfo of each file in this folder, by path; none where it is not there."""
        from pyarrow.fs import FileSelector, FileType

        if self.is_local:
            found = files_below(self.path, recursive=recursive)
        else:
            selector = FileSelector(self.path, recursive=recursive, allow_not_found=True)
            every = self.files.get_file_info(selector)
            found = (one for one in every if one.type == FileType.File)
        return sorted(found, key=lambda one: one.path)

    def name_of(self, path: str) -> str:
        """How people know what has this path in the same filesystem."""
        if self.is_local:
            return path
        base, options = split_options(self.name)
        return base.removesuffix(self.path) + path + options


def split_options(name: str) -> tuple[str, str]:
    """A URL of a bucket without its options, and these as they are written; else empty ones."""
    found = OPTIONS.search(name) if name.lower().startswith(BUCKETS) and is_url(name) else None
    return (name, "") if found is None else (name[: found.start()], found[0])


def in_folder(folder: str, name: str) -> str:
    """What `name` is called in the folder with this name."""
    base, options = split_options(folder)
    return f"{base}/{name}{options}"


def _local_path(name: str) -> str:
    """Absolute. Raises InvalidRequestError: a file URL of another machine."""
    if not name.startswith("file://"):
        return str(Path(name).expanduser().absolute())
    parts = urlsplit(name)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidRequestError(f"{name} names no file of this machine: write file:///PATH")
    return str(Path(unquote(parts.path)).absolute())


def _opened(url: str, options: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    scheme, rest = url.split("://", 1)
    try:
        if scheme in BUCKETS:
            # Only the bucket and its options tell filesystems apart: one is kept for each.
            bucket, slash, path = rest.partition("/")
            if scheme != "s3" and "retry_limit_seconds" not in options:
                options += f"{'&' if options else '?'}retry_limit_seconds={GOOGLE_WAIT_S}"
            files, root = _from_uri(f"{scheme}://{bucket}{options}")
            return files, f"{root}{slash}{path}"
        if scheme in ("hdfs", "abfs", "abfss"):
            opened: tuple[Any, str] = FileSystem.from_uri(url)
            return opened
        return _filesystem(scheme), _stripped(scheme, url)
    except (ValueError, ImportError, OSError, NotImplementedError) as error:
        raise InvalidRequestError(f"{url} cannot be opened: {error}") from error


@lru_cache(maxsize=64)
def _from_uri(url: str) -> tuple[Any, str]:
    from pyarrow.fs import FileSystem

    return FileSystem.from_uri(url)  # type: ignore[no-any-return]


@lru_cache(maxsize=64)
def _filesystem(scheme: str) -> Any:
    """pyarrow's of this machine, or one of fsspec as pyarrow's."""
    from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

    if scheme == "file":
        return LocalFileSystem()
    import fsspec

    return PyFileSystem(FSSpecHandler(fsspec.filesystem(scheme)))


def _stripped(scheme: str, url: str) -> str:
    import fsspec

    return str(fsspec.get_filesystem_class(scheme)._strip_protocol(url))

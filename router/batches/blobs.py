"""Stores the bytes of each file on the disk. All functions block and are called in threads.

Uploads grow in `uploads/` and are renamed into `files/` once they are complete and synced.
`fetched/` holds the audio of running lines: downloads, and hard links, so that a line can still
read a file that is deleted meanwhile.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from cluster.common.errors import OverloadedError
from router.batches.database import disk_full, telling_full_disk

ABANDONED_S = 3600.0  # age from which an upload, or a file without a row, is removed
LINES_PER_LOOK = 64  # lines written between two checks of the free space
FOLDERS = ("files", "uploads", "fetched")
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")


class Blobs:
    def __init__(self, folder: Path, min_free_bytes: int = 0) -> None:
        self._min_free_bytes = min_free_bytes
        self._folder = folder
        self._files, self._uploads, self.fetched = (folder / name for name in FOLDERS)
        shutil.rmtree(self.fetched, ignore_errors=True)
        for one in (self._files, self._uploads, self.fetched):
            one.mkdir(parents=True, exist_ok=True)
            one.chmod(0o700)

    def check_room(self, wanted_bytes: int = 0) -> None:
        """Raises InsufficientStorageError if less than `min_free_bytes` would stay free."""
        if self.free_bytes() - wanted_bytes < self._min_free_bytes:
            raise disk_full()

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    def append(self, upload_id: str, offset: int, piece: bytes) -> None:
        """Raises InsufficientStorageError, or OverloadedError if the earlier bytes are missing."""
        self.check_room(len(piece))
        path = self._path(self._uploads, upload_id)
        if offset and (not path.exists() or path.stat().st_size < offset):
            raise OverloadedError("The upload was lost. Please try again.")
        with telling_full_disk(), path.open("r+b" if offset else "wb") as file:
            file.seek(offset)
            file.write(piece)

    def keep(self, upload_id: str, size_bytes: int) -> None:
        """Turn an upload into a file, unless that is done. Raises OverloadedError if bytes are
        missing, or InsufficientStorageError.
        """
        upload, path = self._path(self._uploads, upload_id), self.path(upload_id)
        if not upload.exists() and path.exists():
            return
        if size_bytes == 0:
            upload.touch()
        if not upload.exists() or upload.stat().st_size != size_bytes:
            raise OverloadedError("The upload was lost. Please try again.")
        with telling_full_disk():
            _sync(upload)
            upload.rename(path)
            _sync(self._files)

    def abort(self, upload_id: str) -> None:
        self._path(self._uploads, upload_id).unlink(missing_ok=True)

    def write(self, file_id: str, lines: Iterable[bytes]) -> int:
        """Write a file and return its size in bytes. Raises InsufficientStorageError."""
        upload = self._path(self._uploads, file_id)
        size_bytes = 0
        try:
            with telling_full_disk(), upload.open("wb") as file:
                for i, line in enumerate(lines):
                    size_bytes += file.write(line)
                    if i % LINES_PER_LOOK == 0:
                        self.check_room()
            self.check_room()
            self.keep(file_id, size_bytes)
        except BaseException:
            upload.unlink(missing_ok=True)
            raise
        return size_bytes

    def path(self, file_id: str) -> Path:
        return self._path(self._files, file_id)

    def read(self, file_id: str, offset: int, length: int) -> bytes:
        """Raises FileNotFoundError."""
        with self.path(file_id).open("rb") as file:
            file.seek(offset)
            return file.read(length)

    def remove(self, file_id: str) -> None:
        self.path(file_id).unlink(missing_ok=True)

    def sweep(self, known: Collection[str]) -> None:
        """Remove uploads, and files without a row, that are older than `ABANDONED_S`."""
        unknown = [path for path in self._files.iterdir() if path.name not in known]
        for path in (*self._uploads.iterdir(), *unknown):
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()

    @staticmethod
    def _path(folder: Path, file_id: str) -> Path:
        assert _ID.fullmatch(file_id), "an id of ours"
        return folder / file_id


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

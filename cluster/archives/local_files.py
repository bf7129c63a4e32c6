"""What there is on this machine, told as pyarrow tells it of other filesystems.

pyarrow's own listing of a folder fails as a whole where one name in it is no UTF-8, as those of old
archives may be. Such a name is shown with `\\x..` for its odd bytes, by which nothing is found: the
file fails by itself.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Any

_ODD_BYTE = re.compile(rb"\\x([0-9a-f]{2})")


def shown(path: str) -> str:
    """A path as it is told, kept and sent."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def has_odd_name(path: str) -> bool:
    """Whether a file is there that is only shown by this path."""
    odd = _ODD_BYTE.sub(lambda found: bytes([int(found[1], 16)]), os.fsencode(path))
    return odd != os.fsencode(path) and not os.path.exists(path) and os.path.exists(odd)


def file_info(path: str) -> Any:
    """pyarrow's FileInfo of a path; one of no known type where the system does not tell."""
    from pyarrow.fs import FileInfo, FileType

    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return FileInfo(shown(path), FileType.NotFound)
    except (OSError, ValueError):
        return FileInfo(shown(path), FileType.Unknown)
    if stat.S_ISDIR(found.st_mode):
        return FileInfo(shown(path), FileType.Directory)
    return FileInfo(shown(path), FileType.File, mtime_ns=found.st_mtime_ns, size=found.st_size)


def files_below(folder: str, *, recursive: bool) -> Iterator[Any]:
    """pyarrow's FileInfo of each file in a folder, without an order; none where it is not there.

    Raises:
        OSError: a folder cannot be read.
    """
    from pyarrow.fs import FileType

    seen: set[tuple[int, int]] = set()  # links may lead in circles
    for root, folders, names in os.walk(folder, onerror=_raise_unless_gone, followlinks=True):
        found = os.stat(root)
        if (found.st_dev, found.st_ino) in seen:
            folders.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        infos = (file_info(os.path.join(root, name)) for name in names)
        yield from (info for info in infos if info.type == FileType.File)
        if not recursive:
            return


def _raise_unless_gone(error: OSError) -> None:
    if isinstance(error, FileNotFoundError):
        return
    raise error

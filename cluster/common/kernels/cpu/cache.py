"""What numba keeps of machine code: where, and when it is out of date.

Where neither the install nor a home can be written (read-only containers, services) numba refuses
to load what is to be cached: librosa does not import, and our kernels are missing. And numba
compares a kernel with its own file only, not with what it calls or constants from elsewhere: so all
of it goes when one of them changes.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"
_FOLDER = Path(__file__).resolve().parent
SHARED_SOURCES = (  # what both roles' kernels are made of
    _FOLDER / "arithmetic.py",
    _FOLDER / "rows.py",
    _FOLDER / "tile_instructions.py",
    _FOLDER / "tile_registers.py",
    _FOLDER / "vector_sums.py",
    _FOLDER / "vectors.py",
    _FOLDER.parents[1] / "model" / "layers.py",
)
LOCK = "kernels.lock"  # held by the process that compiles
MARK = "kernels-"  # and a digest of their sources: the name of an empty file beside what is kept


def ensure_jit_cache(sources: Sequence[Path] = ()) -> None:
    """Call before numba, or what imports it, is imported. sources: files of the kernels."""
    forget_stale_kernels(SHARED_SOURCES)
    if sources:
        forget_stale_kernels(sources, SHARED_SOURCES)
    if os.environ.get(VARIABLE) or _is_writable(_user_cache()):
        return
    if all(_is_writable(folder / "__pycache__") for folder in _packages()):
        return
    # Of this process alone: what lies in that folder is run, so nobody else may write to it.
    folder = tempfile.mkdtemp(prefix="splitscribe-numba-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[VARIABLE] = folder
    if (numba := sys.modules.get("numba")) is not None:
        numba.config.CACHE_DIR = folder
    logger.warning(
        "neither the install nor a home can be written: kernels are compiled at every start; "
        "%s names a folder that keeps them",
        VARIABLE,
    )


def forget_stale_kernels(sources: Sequence[Path], called: Sequence[Path] = ()) -> None:
    """Remove what numba keeps of `sources` unless it was compiled from them and `called` as they
    are.

    A process that is compiling meanwhile loses nothing but what it kept for later ones.
    """
    digest = _digest(sources, called)
    for folder in sorted({_kept_in(file.parent) for file in sources}):
        if (folder / (MARK + digest)).exists():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for old in (*folder.glob("*.nb[ic]"), *folder.glob(f"{MARK}*")):
                old.unlink(missing_ok=True)
            (folder / (MARK + digest)).touch()
        except OSError:  # read-only: nothing is kept there
            continue


@contextmanager
def one_builder(what: str, sources: Sequence[Path]) -> Iterator[None]:
    """While open, no other process of this machine builds `what`, unless it was built before.

    The second waits, then loads. What was compiled once is noted by a file, so that later starts
    load side by side. Without sources, or where nothing can be kept, nobody waits.
    """
    lock = None
    note = _note_of(what, sources) if sources else None
    try:
        if note is not None and not note.exists():
            lock = (note.parent / LOCK).open("w")
            fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks, or one that cannot be written
        note = None
    try:
        yield
        if note is not None:
            with suppress(OSError):
                note.touch()
    finally:
        if lock is not None:
            lock.close()


def _note_of(what: str, sources: Sequence[Path]) -> Path:
    """A file that is there once `what` was compiled from these sources, by this numba, here."""
    import llvmlite.binding as llvm
    import numba

    target = f"{what} {numba.__version__} {llvm.get_host_cpu_name()} {_digest(sources)}"
    words = re.sub(r"[^a-z0-9]+", "-", what.lower()).strip("-")
    folder = _kept_in(sources[0].parent)
    return folder / f"{MARK}{words}-{hashlib.sha256(target.encode()).hexdigest()[:16]}"


def _digest(sources: Sequence[Path], called: Sequence[Path] = SHARED_SOURCES) -> str:
    contents = b"".join(file.read_bytes() for file in (*sources, *called))
    return hashlib.sha256(contents).hexdigest()[:16]


def _kept_in(folder: Path) -> Path:
    """Where numba keeps machine code of the sources in `folder`: it looks in this order."""
    digest = hashlib.sha1(str(folder).encode(), usedforsecurity=False).hexdigest()
    if given := os.environ.get(VARIABLE):
        return Path(given) / f"{folder.name}_{digest}"
    beside = folder / "__pycache__"
    return beside if _is_writable(beside) else _user_cache() / f"{folder.name}_{digest}"


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "numba"


def _packages() -> list[Path]:
    spec = importlib.util.find_spec("librosa")
    found = [Path(__file__).parent]
    if spec is not None and spec.origin is not None:
        found.append(Path(spec.origin).parent)
    return found


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True

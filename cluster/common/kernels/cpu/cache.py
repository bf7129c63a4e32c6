"""Choose the folder in which numba keeps machine code: one for each state of our kernels' sources.

numba compares a kernel with its own file only, not with what it calls or with constants from
elsewhere. In a folder that is named by a digest of all sources nothing is out of date. If no folder
can be written, numba refuses to load our kernels, and librosa cannot be imported.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"
PREFIX = "splitscribe-kernels-"  # and a digest of the sources: the folder's name
N_OTHERS = 2  # folders of other sources that are kept, the last used ones
_ROOT = Path(__file__).resolve().parents[4]
SOURCES = (  # of both roles' kernels, and of constants and named tuples that they read
    "cluster/common/kernels/cpu/*.py",
    "cluster/common/model/layers.py",
    "decoder_worker/cpu/*.py",
    "decoder_worker/sampling/logit_rules.py",
    "decoder_worker/sampling/slots.py",
    "encoder_worker/cpu/*.py",
)


def ensure_jit_cache() -> Path:
    """Set numba's cache folder. Call this before anything that imports numba is imported."""
    name = PREFIX + _digest()
    folders = (base / name for base in _bases(name))
    folder = next((one for one in folders if _is_writable(one)), None) or _temporary(name)
    if os.environ.get(VARIABLE) != str(folder):
        os.environ[VARIABLE] = str(folder)
        if "numba" in sys.modules:
            import numba

            config: Any = numba.config
            config.CACHE_DIR = str(folder)
    with suppress(OSError):  # another process removes the same
        others = [one for one in folder.parent.glob(f"{PREFIX}*") if one != folder]
        others.sort(key=lambda one: one.stat().st_mtime, reverse=True)
        for other in others[N_OTHERS:]:
            shutil.rmtree(other)
    return folder


@contextmanager
def one_builder(role: str, variant: str) -> Iterator[None]:
    """Let one process of this machine at a time build for `role`, unless this was built before.

    The others wait, then load. Compiling at once would take cores from the first, and numba gives
    one file to two variants of a kernel that are kept at the same moment. A file notes what was
    built, so that later starts load side by side. Sources that were written anew, as by an update
    to the same version, are not noted yet, and numba compiles them again.
    """
    import llvmlite.binding as llvm
    import numba

    folder = ensure_jit_cache()
    written_s = [file.stat().st_mtime for file in _sources()]
    target = f"{_ROOT} {written_s} {variant} {numba.__version__} {llvm.get_host_cpu_name()}"
    note = folder / f"{role}-{hashlib.sha256(target.encode()).hexdigest()[:16]}"
    with ExitStack() as held:
        with suppress(OSError):  # a file system without locks
            if not note.exists():
                lock = held.enter_context((folder / f"{role}.lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        with suppress(OSError):
            note.touch()


def _sources() -> list[Path]:
    return sorted(file for pattern in SOURCES for file in _ROOT.glob(pattern))


def _digest() -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in _sources())).hexdigest()[:16]


def _bases(name: str) -> Iterator[Path]:
    if given := os.environ.get(VARIABLE):  # by the operator or a parent process
        yield Path(given).parent if Path(given).name == name else Path(given)
    yield Path(__file__).with_name("__pycache__")
    yield Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "numba"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        os.utime(folder)  # used now
    except OSError:
        return False
    return True


def _temporary(name: str) -> Path:
    """Make a folder that nobody else can write to, because numba runs what lies in it."""
    base = tempfile.mkdtemp(prefix="splitscribe-numba-")
    atexit.register(shutil.rmtree, base, ignore_errors=True)
    folder = Path(base) / name
    folder.mkdir()
    logger.warning(
        "neither the install nor a home can be written: kernels are compiled at every start; "
        "%s names a folder that keeps them",
        VARIABLE,
    )
    return folder

"""Where numba keeps machine code when neither the install nor a home can be written.

Without a folder numba refuses to load what is to be cached: librosa does not import, and our own
kernels are missing. Such are containers with a read-only file system and services without a home.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

VARIABLE = "NUMBA_CACHE_DIR"


def ensure_jit_cache() -> None:
    """Call before numba, or what imports it, is imported."""
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


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "numba"


def _packages() -> list[Path]:
    """The folders of code that numba caches beside itself."""
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

"""Machine code for this CPU without a C++ compiler: numba's, built in the background, cached.

A role asks for its kernels at start and goes on with torch's own operations until `get` has them.
Numba keeps what it built in its cache folder (NUMBA_CACHE_DIR), so that later starts only load it.
Numba is imported only when something is built.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cluster.jit.cache import ensure_jit_cache

logger = logging.getLogger(__name__)

T = TypeVar("T")


class InBackground(Generic[T]):
    """What `build` returns, once it has: `InBackground("encoder", build).get()`."""

    def __init__(self, name: str, build: Callable[[], T], sources: Sequence[Path] = ()) -> None:
        """sources: of the kernels, as `cluster.jit.cache.ensure_jit_cache` takes them."""
        self._name = name
        self._sources = sources
        self._build = build
        self._built: T | None = None
        self._done = threading.Event()
        threading.Thread(target=self._main, name=f"build-{name}", daemon=True).start()

    def get(self) -> T | None:
        """The result; None while it is being built, or when that failed."""
        return self._built

    def wait(self, timeout_s: float) -> T | None:
        """The same, after at most `timeout_s`."""
        self._done.wait(timeout_s)
        return self._built

    def _main(self) -> None:
        begun = time.monotonic()
        try:
            ensure_jit_cache(self._sources)
            self._built = self._build()
            logger.info("%s kernels are ready after %.1f s", self._name, time.monotonic() - begun)
        except Exception as error:  # torch's operations do the same, slower
            reason = str(error).partition("\n")[0]
            logger.warning("no %s kernels, torch's operations stay: %s", self._name, reason)
            logger.debug("why", exc_info=True)
        finally:
            self._done.set()


def as_array(x: Tensor) -> Any:
    """A CPU tensor as a NumPy array on the same memory; bfloat16 as uint16."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()

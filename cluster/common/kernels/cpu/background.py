"""Machine code for this CPU without a C++ compiler: numba's, built in the background, cached.

A role computes by torch's operations until `get` has its kernels, or for good where they do not
compile. Torch rounds in another way, so a worker calls `wait_for_builds` before it says that it is
ready: one text for one audio. One process of a machine compiles, the others load.

Before it loads a kernel from its cache, numba imports all that it could compile with, and scipy:
most of a second and 17 MB in each worker. There is no setting for this, so what is not public in
numba is replaced here, and nowhere else; only in versions that our tests have run with.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from cluster.common.kernels.cpu.cache import ensure_jit_cache, one_builder

logger = logging.getLogger(__name__)

T = TypeVar("T")

TELL_S = 10.0  # between two lines of the log while kernels are built

# What this process has begun to build. Kernels belong to the process, not to an engine: whoever
# waits for them need not know which of its parts has asked for which.
_begun: weakref.WeakSet[InBackground[Any]] = weakref.WeakSet()


class InBackground(Generic[T]):
    """What `build` returns, once it has: `InBackground("encoder", build).get()`.

    variant: what `build` compiles for.
    """

    def __init__(self, name: str, build: Callable[[], T], variant: str = "") -> None:
        self.name = name
        self.variant = variant
        self._build = build
        self._built: T | None = None
        self._done = threading.Event()
        _begun.add(self)
        threading.Thread(target=self._main, name=f"build-{name}", daemon=True).start()

    def get(self) -> T | None:
        """The result; None while it is being built, or when that failed."""
        return self._built

    def wait(self, timeout_s: float) -> T | None:
        self._done.wait(timeout_s)
        return self._built

    def is_done(self, timeout_s: float) -> bool:
        return self._done.wait(timeout_s)

    def _main(self) -> None:
        begun = time.monotonic()
        try:
            ensure_jit_cache()
            load_machine_code_alone()
            with one_builder(self.name, self.variant):
                self._built = self._build()
            logger.info("%s kernels are ready after %.1f s", self.name, time.monotonic() - begun)
        except Exception as error:  # torch's operations do the same, slower
            reason = str(error).partition("\n")[0]
            logger.warning("no %s kernels, torch's operations stay: %s", self.name, reason)
            logger.debug("why", exc_info=True)
        finally:
            self._done.set()


def wait_for_builds() -> None:
    """Wait until each build of this process has ended, well or not; tells how far they are."""
    builds, begun = list(_begun), time.monotonic()
    for build in builds:
        while not build.is_done(TELL_S):
            logger.info(
                "building kernels: %d of %d are done after %.0f s, %s is under way; "
                "later starts only load them",
                sum(one.is_done(0.0) for one in builds),
                len(builds),
                time.monotonic() - begun,
                build.name,
            )


def as_array(x: Tensor) -> Any:
    """A CPU tensor as a NumPy array on the same memory; bfloat16 as uint16, float8 as uint8."""
    bits = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}.get(x.dtype)
    return (x if bits is None else x.view(bits)).numpy()


TESTED = frozenset({(0, 68)})  # versions of numba

_once = threading.Lock()


def load_machine_code_alone() -> None:
    """From now on, in this process; in a version of numba that was not tried, nothing changes."""
    from numba import version_info
    from numba.core import caching

    cache: Any = caching.Cache
    with _once:
        if version_info.short in TESTED and cache.load_overload is not _load_overload:
            _import_sums_without_scipy()
            cache.load_overload = _load_overload


def _import_sums_without_scipy() -> None:
    """As numba does where scipy is not installed, which it needs for products of matrices alone."""
    import numba.np.linalg

    linalg: Any = numba.np.linalg
    usual = linalg.ensure_blas

    def no_blas() -> None:
        raise ImportError("no kernel of ours multiplies matrices by numba")

    linalg.ensure_blas = no_blas
    try:
        import numba.np.arraymath
    finally:
        linalg.ensure_blas = usual


def _load_overload(self: Any, signature: Any, target_context: Any) -> Any:
    """In place of `Cache.load_overload`: machine code needs numba's runtime alone."""
    from numba.core.runtime import nrt

    runtime: Any = nrt.rtsys
    runtime.initialize(target_context)
    with self._guard_against_spurious_io_errors():
        return self._load_overload(signature, target_context)
    return None  # an error of the file system: the kernel is compiled

"""Kernels that were compiled before are loaded without what compiling them takes.

Before it loads a kernel from its cache, numba imports all that it could compile, from hashing to
linear algebra, and scipy with it: most of a second of processor time and 17 MB in each worker.
Machine code needs none of that, and where a kernel has to be compiled numba does it all the same.
There is no setting for this, so what is not public in numba is replaced here, and nowhere else;
only in versions that our tests have run with.
"""

from __future__ import annotations

import threading
from typing import Any

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
    """In place of `Cache.load_overload`: the compiled function, or None where it is not cached.

    Machine code calls numba's runtime, and nothing else that numba would set up.
    """
    from numba.core.runtime import nrt

    runtime: Any = nrt.rtsys
    runtime.initialize(target_context)
    with self._guard_against_spurious_io_errors():
        return self._load_overload(signature, target_context)
    return None  # an error of the file system: the kernel is compiled

"""Machine code for this CPU without a C++ compiler: numba's, compiled once and kept.

An engine builds its kernels before it takes work, so that one audio has one text: torch, which does
the same where they do not compile, rounds in another way. One process of a machine compiles, the
others load.

Before it loads a kernel from its cache, numba imports all that it could compile with, and scipy:
most of a second and 17 MB in each worker. There is no setting for this, so what is not public in
numba is replaced here, and nowhere else; only in versions that our tests have run with.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from cluster.common.kernels.cpu.cache import ensure_jit_cache, one_builder

logger = logging.getLogger(__name__)

T = TypeVar("T")

TELL_S = 10.0  # after which whoever reads the log is told what is waited for


def built(name: str, variant: str, build: Callable[[], T]) -> T | None:
    """What `build` compiles for a variant, or loads; None where that fails: torch's stay."""
    begun = time.monotonic()
    message = "compiling %s kernels, for a minute or so; later starts only load them"
    telling = threading.Timer(TELL_S, logger.info, (message, name))
    telling.daemon = True
    telling.start()
    try:
        ensure_jit_cache()
        load_machine_code_alone()
        with one_builder(name, variant):
            kernels = build()
        logger.info("%s kernels are ready after %.1f s", name, time.monotonic() - begun)
        return kernels
    except Exception as error:  # torch's operations do the same, slower
        reason = str(error).partition("\n")[0]
        logger.warning("no %s kernels, torch's operations stay: %s", name, reason)
        logger.debug("why", exc_info=True)
        return None
    finally:
        telling.cancel()


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

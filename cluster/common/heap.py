"""The C library's heap, which keeps freed memory until it is told to return it."""

from __future__ import annotations

import contextlib
import ctypes


def give_memory_back() -> None:
    """Return freed memory to the system, where the C library can. Takes milliseconds."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

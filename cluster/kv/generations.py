"""The generation counters of an exporter's pages, which show a reader that its read was stale.

They are host memory that readers READ, and know neither the pool nor the transport. Thread-safe.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

COUNTER_BYTES = 8
_ONE = np.uint64(1)


class GenerationCounters:
    """One 64-bit counter per page, in host memory even where the pool is on a GPU.

    A page's counter is bumped when it is reserved, before anything is written to it, and again
    when it is freed; while a published window is kept, it stays as it is. So the counter of a
    lease's first page, read after the payload, still has the handle's value only if no page of the
    lease changed hands in between: the pages of a window are freed together. Counters start at
    random, so that another process's memory found at the same address does not pass for ours.
    """

    def __init__(self, n_pages: int, randbits: Callable[[int], int] = secrets.randbits) -> None:
        start = [randbits(62) for _ in range(n_pages)]
        self.array: NDArray[np.uint64] = np.array(start, dtype=np.uint64)
        self._lock = threading.Lock()

    def bump(self, pages: Sequence[int]) -> None:
        which: slice | list[int] = list(pages)
        if pages and which == list(range(pages[0], pages[0] + len(pages))):
            which = slice(pages[0], pages[0] + len(pages))  # neighbours: several times as quick
        with self._lock:
            self.array[which] += _ONE

    def value(self, page: int) -> int:
        return int(self.array[page])

    def address(self, page: int) -> int:
        return int(self.array.ctypes.data) + page * COUNTER_BYTES

"""Counts of what was refused, by reason. Thread-safe; knows nothing of what is counted."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class Tally:
    """How often each thing happened since the start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        with self._lock:
            self._counts[reason] += 1

    def counts(self) -> Mapping[str, int]:
        """A copy."""
        with self._lock:
            return dict(self._counts)


def summed(counts: Mapping[str, int], more: Mapping[str, int]) -> Mapping[str, int]:
    """Both together, by reason."""
    return dict(Counter(counts) + Counter(more))

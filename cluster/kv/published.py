"""What an exporter has published: which pages, how many leases read them, and what is kept.

It owns the pages of a window from its publication on, and counts their readers. A window that was
published under a key outlives its last lease: it is kept, and the same key opens it again, until
its pages are needed; then what was released longest ago is evicted first. A window without a key
goes with its last lease. Knows neither pool, generations nor time. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kv.pool import Pages


@dataclass(slots=True, eq=False)
class PublishedWindow:
    """One window's pages, in frame order; `key` is empty where nothing may find it again."""

    pages: Pages
    frames: int
    key: bytes
    readers: int


class PublishedWindows:
    """All of one exporter. What a method hands back to be freed is its caller's from then on.

    n_evicted: windows whose pages were needed for others, since the start.
    """

    def __init__(self) -> None:
        self.n_evicted = 0
        self._lock = threading.Lock()
        self._by_page: dict[int, PublishedWindow] = {}  # each under all of its pages
        self._by_key: dict[bytes, PublishedWindow] = {}
        self._kept: dict[bytes, PublishedWindow] = {}  # without readers, oldest release first

    @property
    def n_pages(self) -> int:
        return len(self._by_page)

    @property
    def n_kept(self) -> int:
        """Windows that nobody reads."""
        return len(self._kept)

    @property
    def n_kept_pages(self) -> int:
        with self._lock:
            return sum(len(window.pages) for window in self._kept.values())

    @property
    def n_read(self) -> int:
        """Windows that somebody may read."""
        with self._lock:
            return len({id(one) for one in self._by_page.values() if one.readers})

    @property
    def n_read_pages(self) -> int:
        """Pages of those windows."""
        with self._lock:
            return sum(1 for one in self._by_page.values() if one.readers)

    def add(self, pages: Sequence[int], frames: int, key: bytes, n_readers: int) -> Pages:
        """Take over written pages.

        A window of the same key gives way: it is no longer found, and goes with its last reader.

        Returns:
            The pages of that window, if nobody reads it: they are to be freed.

        Raises:
            ValueError: a page is published already, or nothing would ever end the window.
        """
        if not key and not n_readers:
            raise ValueError("a window without a key and without a reader cannot be published")
        with self._lock:
            self._refuse_published(pages)
            outdated = self._by_key.get(key) if key else None
            freed = () if outdated is None else self._forget(outdated)
            window = PublishedWindow(tuple(pages), frames, key, n_readers)
            self._by_page.update(dict.fromkeys(window.pages, window))
            if key:
                self._by_key[key] = window
                if not n_readers:
                    self._kept[key] = window
            return freed

    def open(self, key: bytes) -> PublishedWindow | None:
        """Count one more reader of the window with this key; None where there is none."""
        with self._lock:
            window = self._by_key.get(key)
            if window is not None:
                window.readers += 1
                self._kept.pop(key, None)
            return window

    def close(self, pages: Sequence[int]) -> Pages:
        """Count one reader of these pages less; the pages to be freed, if any.

        Raises:
            RuntimeError: nobody reads them.
        """
        with self._lock:
            window = self._by_page.get(pages[0])
            if window is None or not window.readers:
                raise RuntimeError(f"pages {tuple(pages)} have no reader")
            window.readers -= 1
            if window.readers:
                return ()
            if window.key:
                self._kept[window.key] = window
                return ()
            return self._remove(window)

    def evict(self) -> Pages:
        """Give up the kept window that was released longest ago: its pages, to be freed."""
        with self._lock:
            window = next(iter(self._kept.values()), None)
            if window is None:
                return ()
            self.n_evicted += 1
            return self._forget(window)

    def forget_all(self) -> list[Pages]:
        """Keep nothing from here on: the pages of each kept window, to be freed."""
        with self._lock:
            freed = [self._forget(window) for window in tuple(self._by_key.values())]
            return [pages for pages in freed if pages]

    def check_unpublished(self, pages: Sequence[int]) -> None:
        """Raise ValueError when one of `pages` is published."""
        with self._lock:
            self._refuse_published(pages)

    def check_integrity(self, n_readers: int) -> None:
        """Raise RuntimeError unless there are so many readers and every table agrees."""
        with self._lock:
            windows = list({id(one): one for one in self._by_page.values()}.values())
            found = sum(window.readers for window in windows)
            if found != n_readers:
                raise RuntimeError(f"{found} readers are counted, expected {n_readers}")
            for window in windows:
                if any(self._by_page.get(page) is not window for page in window.pages):
                    raise RuntimeError(f"pages {window.pages} belong to two windows")
                if bool(window.key) != (self._by_key.get(window.key) is window):
                    raise RuntimeError(f"the window in pages {window.pages} is under a wrong key")
                kept = self._kept.get(window.key) is window
                if kept != (not window.readers):
                    raise RuntimeError(
                        f"the window in pages {window.pages} is neither read nor kept"
                    )
            pages = sum(len(window.pages) for window in windows)
            if pages != len(self._by_page) or len(self._by_key) > len(windows):
                raise RuntimeError("a table has windows that are not published")

    def _forget(self, window: PublishedWindow) -> Pages:
        """Take a window's key away: nobody finds it then. Its pages if nobody reads it, else ()."""
        self._by_key.pop(window.key, None)
        self._kept.pop(window.key, None)
        window.key = b""
        return () if window.readers else self._remove(window)

    def _remove(self, window: PublishedWindow) -> Pages:
        for page in window.pages:
            del self._by_page[page]
        return window.pages

    def _refuse_published(self, pages: Sequence[int]) -> None:
        if not self._by_page.keys().isdisjoint(pages):
            taken = sorted(page for page in pages if page in self._by_page)
            raise ValueError(f"pages {taken} are published")

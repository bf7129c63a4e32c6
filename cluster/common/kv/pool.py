"""A worker's page pool: one block of memory, and a table of the pages' states.

A page is free, used (taken by `allocate`) or quarantined (its owner gave it up, but a transfer may
still write to it); `release` is the only way back to free. Whether a GPU has room is worked out
from shapes before anything is allocated.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from cluster.common.errors import ConfigurationError
from cluster.common.kv.layout import FLOAT8, PageLayout
from cluster.common.model.weights import TORCH_DTYPES

Pages = tuple[int, ...]  # of one window, in frame order

CPU_WINDOWS = 16  # where the settings leave it open
RESERVE_BYTES = 2 << 30  # for CUDA's context, libraries' workspaces and fragmentation

_FREE, _USED, _QUARANTINED = 0, 1, 2
_DTYPES = {**TORCH_DTYPES, FLOAT8: torch.float8_e4m3fn}


class PagePool:
    """`n_pages` pages of `layout`, as one tensor and one table of states. Thread-safe.

    tensor: [n_pages, *layout.page_shape], contiguous. KV is [n_pages, layer, 2, page_frames, head,
        head_dim]; on axis 2, index 0 is K and 1 is V.
    lock: guards the table, and that of an exporter.
    packs: windows of fewer frames lie contiguous at a page's beginning. So do states, and KV on a
        CPU with a page per window (`cross_kv.packed_page`).
    """

    def __init__(self, layout: PageLayout, n_pages: int, device: str = "cpu") -> None:
        if n_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {n_pages}")
        self.layout = layout
        self.n_pages = n_pages
        self.page_bytes = layout.page_bytes
        self.n_bytes = n_pages * layout.page_bytes
        self.device = torch.device(device)
        is_whole = layout.page_frames == layout.n_frames
        self.packs = layout.payload == "encoder_states" or (self.device.type == "cpu" and is_whole)
        self.tensor = _make_tensor(layout, n_pages, self.device)
        self.base_address = self.tensor.data_ptr()
        self.n_free = n_pages
        self.n_quarantined = 0
        self._state = bytearray(n_pages)
        self.lock = threading.RLock()
        self._freed = threading.Condition(self.lock)  # used under the lock

    def __repr__(self) -> str:
        return (
            f"PagePool({self.n_pages} pages of {self.page_bytes} bytes on {self.device}, "
            f"{self.n_free} free, {self.n_quarantined} quarantined)"
        )

    @property
    def layout_hash(self) -> str:
        """Hash that both ends share: of the layout, and of how a short window lies in a page."""
        is_whole = self.layout.page_frames == self.layout.n_frames
        return f"{self.layout.hash}-unpacked" if is_whole and not self.packs else self.layout.hash

    @property
    def n_used(self) -> int:
        with self.lock:
            return self.n_pages - self.n_free - self.n_quarantined

    def addresses(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Byte address of each page, in the address space of `device`."""
        if pages and not 0 <= min(pages) <= max(pages) < self.n_pages:
            raise ValueError(f"not all of the pages {tuple(pages)} are in 0..{self.n_pages - 1}")
        base, page_bytes = self.base_address, self.page_bytes
        return tuple([base + page * page_bytes for page in pages])

    def page_at(self, address: int) -> int:
        page, rest = divmod(address - self.base_address, self.page_bytes)
        if rest or not 0 <= page < self.n_pages:
            raise ValueError(f"no page of this pool begins at {address:#x}")
        return page

    def filled_bytes(self, frames: int) -> int:
        """Bytes of each page, from its beginning, that a window of so many frames fills."""
        if not self.packs:
            return self.page_bytes
        return self.page_bytes // self.layout.n_frames * frames

    def bytes_at(self, address: int, n_bytes: int) -> torch.Tensor:
        """View `n_bytes` from a page's beginning on as uint8. Raises ValueError."""
        begin = self.page_at(address) * self.page_bytes
        if not 0 < n_bytes <= self.n_bytes - begin:
            raise ValueError(f"the pool has no {n_bytes} bytes at {address:#x}")
        return self.tensor.view(torch.uint8).flatten()[begin : begin + n_bytes]

    def allocate(
        self,
        n_pages: int,
        timeout_s: float = 0.0,
        make_room: Callable[[], bool] = lambda: False,
    ) -> Pages | None:
        """Take `n_pages` free pages, neighbours if possible, so that transfers coalesce.

        Waits up to `timeout_s`; None if there are too few. make_room: called under the lock while
        there are too few; it releases some pages, or returns False.
        """
        if not 1 <= n_pages <= self.n_pages:
            raise ValueError(f"cannot take {n_pages} pages of a pool of {self.n_pages}")
        deadline = time.monotonic() + timeout_s
        with self.lock:
            while self.n_free < n_pages:
                if make_room():
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._freed.wait(left)
            pages = self._find_free(n_pages)
            self._mark(pages, _USED)
            self.n_free -= n_pages
            return pages

    def release(self, pages: Sequence[int]) -> None:
        """Give all of these used pages back, or none: RuntimeError if one is not in use."""
        with self.lock:
            self._check(pages, _USED)
            self._mark(pages, _FREE)
            self.n_free += len(pages)
            self._freed.notify_all()

    def wake(self) -> None:
        """Let threads in `allocate` try `make_room` again."""
        with self.lock:
            self._freed.notify_all()

    def quarantine(self, pages: Sequence[int]) -> None:
        """Take used pages from their owner without freeing them: they may still be written."""
        with self.lock:
            self._check(pages, _USED)
            self._mark(pages, _QUARANTINED)
            self.n_quarantined += len(pages)

    def lift(self, pages: Sequence[int]) -> None:
        with self.lock:
            self._check(pages, _QUARANTINED)
            self._mark(pages, _USED)
            self.n_quarantined -= len(pages)
            self.release(pages)

    def check_used(self, pages: Sequence[int]) -> None:
        with self.lock:
            self._check(pages, _USED)

    def check_integrity(self, n_used: int = 0) -> None:
        """Raise RuntimeError unless exactly `n_used` pages are out and every count agrees."""
        with self.lock:
            free = self._state.count(_FREE)
            quarantined = self._state.count(_QUARANTINED)
            used = self._state.count(_USED)
            if (free, quarantined) != (self.n_free, self.n_quarantined):
                raise RuntimeError(
                    f"pool counts disagree: {free} free and {quarantined} quarantined in the "
                    f"table, {self.n_free} and {self.n_quarantined} counted"
                )
            if used != n_used:
                held = [page for page, state in enumerate(self._state) if state == _USED]
                raise RuntimeError(f"{used} pages are in use, expected {n_used}: {held[:16]}")

    def _find_free(self, n_pages: int) -> Pages:
        """The first run of `n_pages` free pages; without one the first free pages."""
        start = self._state.find(bytes(n_pages))  # _FREE is 0
        if start >= 0:
            return tuple(range(start, start + n_pages))
        free = (page for page, state in enumerate(self._state) if state == _FREE)
        return tuple(islice(free, n_pages))

    def _mark(self, pages: Sequence[int], state: int) -> None:
        for page in pages:
            self._state[page] = state

    def _check(self, pages: Sequence[int], state: int) -> None:
        if len(set(pages)) != len(pages):
            raise RuntimeError(f"a page is named twice in {tuple(pages)}")
        names = ("free", "used", "quarantined")
        for page in pages:
            if not 0 <= page < self.n_pages:
                raise RuntimeError(f"page {page} is not in 0..{self.n_pages - 1}")
            if self._state[page] != state:
                raise RuntimeError(
                    f"page {page} is {names[self._state[page]]}, expected {names[state]}"
                )


def _make_tensor(layout: PageLayout, n_pages: int, device: torch.device) -> torch.Tensor:
    shape = (n_pages, *layout.page_shape)
    dtype = _DTYPES[layout.dtype]
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, n_pages * layout.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a cross-process read pins 512 times fewer pages
    # The tensor keeps the mapping alive; it is unmapped when the last view of it is gone.
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class GpuBudget:
    name: str
    free_bytes: int

    def less(self, n_bytes: int) -> GpuBudget:
        return GpuBudget(self.name, max(0, self.free_bytes - n_bytes))


def gpu_budget(device: str, share: float = 1.0) -> GpuBudget | None:
    """Free memory of the current CUDA device, of which `share` is ours; None on a CPU."""
    if device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info()
    left = int(share * total) - torch.cuda.memory_reserved()
    return GpuBudget(torch.cuda.get_device_name(), max(0, min(free, left)))


def pool_windows(
    field: str,  # the setting's name, for messages
    asked: int,  # the setting's value; 0 leaves the number open
    most: int,  # how many are of use then
    window_bytes: int,  # in this pool, or in all pools that hold equally many
    budget: GpuBudget | None,
    needs: Mapping[str, int],  # bytes of the worker's other parts, by name
    portion: float = 1.0,  # of the room to take where the number is open and other pools follow
) -> int:
    """How many windows a pool holds. Raises ConfigurationError if so many do not fit."""
    if budget is None:
        return asked or CPU_WINDOWS
    needs = {**needs, "reserve": RESERVE_BYTES}
    room = budget.free_bytes - sum(needs.values())
    fits = max(0, room // window_bytes)
    if asked > fits or fits < 1:
        parts = ", ".join(f"{_gb(size)} for {what}" for what, size in needs.items())
        raise ConfigurationError(
            f"{field}: {asked or 1} windows of {_gb(window_bytes)} do not fit: {budget.name} has "
            f"{_gb(budget.free_bytes)} for this worker, less {parts}, which leaves room for {fits}"
        )
    return asked or max(1, min(most, int(portion * room) // window_bytes))


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"

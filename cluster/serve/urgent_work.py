"""What the processes of a machine tell each other of urgent work and of bulk work.

Bulk work is to take what others leave. On a CPU they share cores, and not only in one process:
while an encoder works for a client, a decoder's steps for bulk work would slow it down. So each
worker tells how many cores its urgent work may use at this moment, in a small file in memory that
the workers of a Ray cluster on one machine share, and bulk work waits between two units of a few
milliseconds while others may use half of the cores or more. It never waits for longer than
`PATIENCE_S`, so it goes on, slowly, under any load.

Encoders also tell when they encode bulk windows. Their threads run only when cores are idle, and a
decoder's bulk steps would leave them none, so it waits with such a step until it has windows enough
to fill it.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

PATIENCE_S = 1.0
LOOK_S = 1.0  # between two looks for processes that came or went
WORD_BYTES = 8
DRAFT = "new-"  # begins the name of a slot that is not whole yet
SLOT_BYTES = 2 * WORD_BYTES  # cores of urgent work; cores of encoders that have bulk windows
_PROCESSES = Path("/proc")
_MEMORY = Path("/dev/shm")  # memory; a folder in it whose owner is checked
_numbers = itertools.count()


class UrgentWork:
    """What this process and its neighbours do for others than bulk work. Thread-safe.

    folder: shared by the processes; None: there is this process alone.
    cores: of this machine.
    """

    def __init__(self, folder: Path | None, cores: int) -> None:
        self._folder = folder
        self._enough = max(1, cores // 2)
        self._lock = threading.Lock()
        self._n_cores, self._n_bulk_cores = 0, 0
        self._cores = cores
        self._own: mmap.mmap | None = None
        self._others: dict[str, mmap.mmap] = {}
        self._look_s = 0.0
        if folder is not None:
            self._name = _own_name()
            self._own = _new_slot(folder / self._name)

    @classmethod
    def of_cluster(cls) -> Self:
        """That of the Ray cluster of this process; alone where there is none, or no memory."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        try:
            return cls(_folder_of_cluster(), cores)
        except OSError as error:
            logger.warning("bulk work of other processes does not hear of this one: %s", error)
            return cls(None, cores)

    @contextmanager
    def during(self, n_cores: int) -> Iterator[None]:
        """Urgent work that may use so many cores is under way."""
        self._add(n_cores)
        try:
            yield
        finally:
            self._add(-n_cores)

    def encode_bulk(self, n_cores: int) -> None:
        """Tell on how many cores this process encodes bulk windows; 0: it has none any more."""
        with self._lock:
            self._n_bulk_cores = n_cores
            self._tell()

    def bulk_is_encoded(self) -> bool:
        """Whether encoders of this machine that have bulk windows may use all cores for them."""
        others = sum(_word(slot, 1) for _, slot in self._seen())
        return self._n_bulk_cores + others >= self._cores

    def leaves_cores(self) -> bool:
        """Whether urgent work of all processes leaves half of the cores or more."""
        return self._n_used("") < self._enough

    def leaves_process(self) -> bool:
        """The same of this process alone, whose threads share more than cores: Python's lock."""
        return self._n_used(f"{os.getpid()}-") < self._enough

    def _n_used(self, begin: str) -> int:
        """Cores, by this one and by those whose names begin so."""
        n_cores = self._n_cores
        for name, slot in self._seen():
            if name.startswith(begin):
                n_cores += _word(slot, 0)
        return n_cores

    def close(self) -> None:
        """Take the own slot away."""
        with self._lock:
            if self._own is not None and self._folder is not None:
                with suppress(OSError):
                    (self._folder / self._name).unlink()
                    self._folder.rmdir()  # fails while others have slots there

    def _add(self, n_cores: int) -> None:
        with self._lock:
            self._n_cores += n_cores
            self._tell()

    def _tell(self) -> None:
        if self._own is not None:
            for place, number in enumerate((self._n_cores, self._n_bulk_cores)):
                begin = place * WORD_BYTES
                self._own[begin : begin + WORD_BYTES] = number.to_bytes(WORD_BYTES, "little")

    def _seen(self) -> list[tuple[str, mmap.mmap]]:
        if self._folder is not None and time.monotonic() >= self._look_s:
            with self._lock:
                self._look_s = time.monotonic() + LOOK_S
                self._look(self._folder)
        return list(self._others.items())

    def _look(self, folder: Path) -> None:
        """Map the slots of processes that came, and drop those of processes that ended."""
        found: dict[str, mmap.mmap] = {}
        with suppress(OSError):
            for name in os.listdir(folder):
                if name == self._name or name.startswith(DRAFT):
                    continue
                if not _is_alive(name):
                    (folder / name).unlink(missing_ok=True)
                    continue
                with suppress(OSError, ValueError):  # it went, or is no slot
                    found[name] = self._others.get(name) or _open_slot(folder / name)
        self._others = found


class BulkGate:
    """Says when bulk work may do its next unit: `while not gate(): wait a moment`.

    may_run: `leaves_cores` or `leaves_process` of an `UrgentWork`.
    """

    def __init__(
        self, may_run: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._may_run = may_run
        self._clock = clock
        self._waits_since_s: float | None = None

    def __call__(self) -> bool:
        if self._may_run():
            self._waits_since_s = None
            return True
        now_s = self._clock()
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        if now_s - self._waits_since_s < PATIENCE_S:
            return False
        self._waits_since_s = now_s
        return True


def _folder_of_cluster() -> Path | None:
    """Where the replicas of this Ray cluster on this machine meet; None without Ray.

    Raises:
        OSError: it cannot be made, or is somebody else's.
    """
    import ray

    if not ray.is_initialized():
        return None
    address = ray.get_runtime_context().gcs_address
    root = _MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    folder = root / f"splitscribe-{os.getuid()}-{re.sub(r'[^0-9A-Za-z]+', '-', address)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's")
    return folder


def _new_slot(path: Path) -> mmap.mmap:
    """It appears whole: a neighbour that found it empty could not map it."""
    draft = path.with_name(f"{DRAFT}{path.name}")
    draft.write_bytes(bytes(SLOT_BYTES))
    draft.rename(path)
    return _open_slot(path)


def _open_slot(path: Path) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), SLOT_BYTES)


def _word(slot: mmap.mmap, place: int) -> int:
    return int.from_bytes(slot[place * WORD_BYTES : (place + 1) * WORD_BYTES], "little")


def _own_name() -> str:
    return f"{os.getpid()}-{_began(os.getpid())}-{next(_numbers)}"


def _is_alive(name: str) -> bool:
    """Whether the process still runs that called its slot so; not a later one with its number."""
    pid, began, _ = name.split("-")
    return _began(int(pid)) == began


def _began(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty where there is no such process.

    Where the system does not say (it is not Linux) "0" for each.
    """
    if not _PROCESSES.exists():
        return "0"
    try:
        told = (_PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return ""
    return told.rpartition(")")[2].split()[19]  # of the fields behind the name, which may have any

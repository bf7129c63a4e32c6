"""The interface between KV and its transports, which implement `Wire` and pass `tests/contract`.

One thread owns a wire, for an exporter or an importer. A wire knows nothing of handles, leases and
generations. No torch.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.common.errors import ConfigurationError, SplitscribeError
from cluster.common.settings import Transport

if TYPE_CHECKING:
    from cluster.common.kv.pool import PagePool

logger = logging.getLogger(__name__)

COUNTER_BYTES = 8  # of a page's generation
OPEN_TIMEOUT_S = 60.0  # for a transport to start
CLOSE_TIMEOUT_S = 10.0  # for it to stop
LEASE_S = 10.0  # from publication, or from the last renewal
RENEW_S = 3.0  # how often a decoder renews all its leases of a peer


@dataclass(frozen=True, slots=True)
class TransferConfig:
    cluster_key: bytes = field(repr=False)  # signs handles; the same in a whole cluster, not empty
    name: str  # role and replica, as in "encoder-0"; agent names begin with it
    transport: Transport = "auto"
    device: str = "cpu"
    lease_s: float = LEASE_S
    renew_s: float = RENEW_S
    fetch_timeout_s: float = 10.0
    clock: Callable[[], float] = time.monotonic
    randbits: Callable[[int], int] = secrets.randbits  # a random integer of so many bits

    def __post_init__(self) -> None:
        if not isinstance(self.cluster_key, bytes) or not self.cluster_key:
            raise ValueError("cluster_key must be non-empty bytes")

    def new_agent_name(self) -> str:
        """A name that is unique among processes and their restarts."""
        return f"{self.name}-{os.getpid()}-{self.randbits(32):08x}"


@dataclass(frozen=True, slots=True)
class FetchStats:
    n_bytes: int
    seconds: float  # from post to verified generation
    transport: str


@dataclass(frozen=True, slots=True)
class Descriptor:
    """`n_bytes` at `remote` in the exporter's pool, to copy to `local` in the importer's."""

    local: int
    remote: int
    n_bytes: int


def descriptors(local: Sequence[int], remote: Sequence[int], page_bytes: int) -> list[Descriptor]:
    """Pair the pages at these addresses, and merge pages that are neighbours on both sides.

    page_bytes: to read from each page's beginning; less than a page where there is only one. Pages
    of 100 bytes, local at 0, 100, 200 and remote at 500, 600, 900, make two descriptors: 200 bytes
    from 500 to 0 and 100 bytes from 900 to 200.
    """
    merged: list[Descriptor] = []
    for here, there in zip(local, remote, strict=True):
        if merged:
            last = merged[-1]
            if last.local + last.n_bytes == here and last.remote + last.n_bytes == there:
                merged[-1] = Descriptor(last.local, last.remote, last.n_bytes + page_bytes)
                continue
        merged.append(Descriptor(here, there, page_bytes))
    return merged


class Wire(Protocol):
    """One worker's end of a transport: an agent with one pool and one array of counters.

    An exporter opens it, drains notifications and closes it; an importer does everything else. All
    methods are called by the thread that called `open`, and none waits for a peer. Those that take
    an agent's name, and `poll`, raise PeerLostError when that peer is gone, and HandleRefusedError
    when it has no such memory.
    """

    transport: str  # what moves the bytes; may become more precise after the first read
    agent: str  # the name of this end, unique over all hosts and restarts
    metadata: bytes  # what a peer needs in order to connect; filled by `open`
    # Set by an exporter. Transports that can tell call it, on any thread, when there is something
    # to drain.
    on_notification: Callable[[], object]

    def open(self, pool: PagePool, counters: NDArray[np.uint64]) -> None:
        """Let peers read pool and counters (in host memory), or let reads land there.

        Raises ConfigurationError if the transport does not work on this machine.
        """

    def drain(self) -> Sequence[bytes]:
        """Notifications that came in since the last call; untrusted."""

    def connect(self, agent: str, metadata: bytes) -> None: ...

    def disconnect(self, agent: str) -> None:
        """Forget a peer; nothing of it may be in flight."""

    def read_pages(self, agent: str, descs: Sequence[Descriptor]) -> object:
        """Post a read of pages into the pool; returns a token for `poll`.

        A posted read cannot be cancelled: it may write until `poll` returns True or raises.
        """

    def read_counter(self, agent: str, local: int, remote: int, notification: bytes) -> object:
        """Post a read of the counter at `remote` into `local`; returns a token for `poll`.

        The peer gets `notification` after the read is done, unless it is empty.
        """

    def poll(self, read: object) -> bool:
        """Whether `read` is done. When this returns True or raises, `read` has ended."""

    def notify(self, agent: str, payload: bytes) -> None:
        """Send a notification, which may get lost."""

    def close(self) -> None:
        """End what is in flight; afterwards nothing is readable or written."""


class WireThread:
    """Calls `start`, then `run` until it returns or raises, then `end`."""

    def __init__(
        self,
        owner: str,
        start: Callable[[], None],
        run: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        """Return when `start` has returned; its errors are raised as a SplitscribeError."""
        self.failure: str | None = None  # why the thread died
        self._owner = owner
        self._started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._live, args=(start, run, end), name=f"kv-{owner}", daemon=True
        )
        self._thread.start()
        self._started.result(OPEN_TIMEOUT_S)

    def join(self) -> None:
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the KV %s's thread did not stop in %.0f s", self._owner, CLOSE_TIMEOUT_S)

    def _live(
        self, start: Callable[[], None], run: Callable[[], None], end: Callable[[], None]
    ) -> None:
        try:
            start()
        except SplitscribeError as error:
            self._started.set_exception(error)
            return
        except Exception as error:
            message = f"the KV transport could not start: {error!r}"
            self._started.set_exception(ConfigurationError(message))
            return
        self._started.set_result(None)
        try:
            run()
        except Exception as error:
            logger.exception("the KV %s's thread died", self._owner)
            self.failure = f"the KV {self._owner}'s thread died: {error}"
        finally:
            end()


# Makes what runs a wire: a `WireThread`, or in simulations something with the same methods.
MakeThread = Callable[[str, Callable[[], None], Callable[[], None], Callable[[], None]], Any]

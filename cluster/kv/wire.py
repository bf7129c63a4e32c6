"""What the exporter and the importer need of a transport, and the notifications they exchange.

`Inbox` (exporter side) makes memory readable and hands over notifications; `Wire` (importer side)
reads. Each is used by one thread only, the one that opened it. A notification is `REL:<lease>`
(the handle is not wanted), `REL:<lease>:<us>:<us>` (it was read, in so many microseconds; so long
does the reader take to project a window) or `REN:<lease>,<lease>` (keep these alive); whoever knows
a lease's nonce may send it, everything else in it is untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ConfigurationError, SplitscribeError
from cluster.kv.leases import GenerationCounters
from cluster.kv.pool import PagePool

OPEN_TIMEOUT_S = 60.0  # for a transport to start
CLOSE_TIMEOUT_S = 10.0  # and to stop
MAX_NOTIFICATION_BYTES = 7_000  # NIXL delivers up to 8 KB
_LEASE_BYTES = 33  # 32 hex digits and a comma
_LEASES_PER_NOTIFICATION = (MAX_NOTIFICATION_BYTES - 4) // _LEASE_BYTES
_RENEWAL = re.compile(rb"REN:([0-9a-f]{32}(?:,[0-9a-f]{32})*)")
_RELEASE = re.compile(rb"REL:([0-9a-f]{32})(?::([0-9]{1,9}):([0-9]{1,9}))?")
_MAX_US = 999_999_999  # nine digits


@dataclass(frozen=True, slots=True)
class Span:
    """`n_bytes` at `remote`, in the exporter's pool, that go to `local`, in the importer's."""

    local: int
    remote: int
    n_bytes: int


def spans(local: Sequence[int], remote: Sequence[int], page_bytes: int) -> list[Span]:
    """Pair the pages at these addresses, merging pages that are neighbours on both sides.

    Example: local pages at 0, 100, 200 and remote at 500, 600, 900, of 100 bytes: two spans,
    200 bytes from 500 to 0 and 100 bytes from 900 to 200.
    """
    merged: list[Span] = []
    for here, there in zip(local, remote, strict=True):
        if merged:
            last = merged[-1]
            if last.local + last.n_bytes == here and last.remote + last.n_bytes == there:
                merged[-1] = Span(last.local, last.remote, last.n_bytes + page_bytes)
                continue
        merged.append(Span(here, there, page_bytes))
    return merged


def release_message(lease: str) -> bytes:
    return b"REL:" + lease.encode()


def read_message(lease: str, read_s: float, projection_s: float) -> bytes:
    """A release that tells how the READ went; see `cluster.kv.transfer.ReadReport`."""
    read_us, projection_us = (min(round(s * 1e6), _MAX_US) for s in (read_s, projection_s))
    return b"%b:%d:%d" % (release_message(lease), read_us, projection_us)


def renewal_messages(leases: Sequence[str]) -> Iterator[bytes]:
    """Renewals of all `leases`, in as few notifications as their size allows."""
    for start in range(0, len(leases), _LEASES_PER_NOTIFICATION):
        batch = leases[start : start + _LEASES_PER_NOTIFICATION]
        yield b"REN:" + ",".join(batch).encode()


class Notification(NamedTuple):
    """What a peer asks for. A release has one lease, and `times_s` where it was read.

    times_s: of the READ and of a projection, as in `ReadReport`.
    """

    kind: Literal["REL", "REN"]
    leases: list[str]
    times_s: tuple[float, float] | None = None


def parse_notification(payload: bytes) -> Notification | None:
    """What a peer asks for, or None when the payload is none of ours."""
    if len(payload) > MAX_NOTIFICATION_BYTES:
        return None
    if match := _RENEWAL.fullmatch(payload):
        return Notification("REN", match[1].decode().split(","))
    if match := _RELEASE.fullmatch(payload):
        times_s = (int(match[2]) / 1e6, int(match[3]) / 1e6) if match[2] else None
        return Notification("REL", [match[1].decode()], times_s)
    return None


class Inbox(Protocol):
    """Exporter side of a transport."""

    transport: str
    agent: str  # unique over all hosts and restarts
    metadata: bytes  # what a reader needs to connect; filled by `open`

    def open(self, pool: PagePool, counters: GenerationCounters) -> None:
        """Make the pool and the counters readable."""

    def drain(self) -> Iterable[bytes]:
        """Notifications that came in since the last call; does not wait."""

    def close(self) -> None:
        """Nothing is readable any more."""


class Wire(Protocol):
    """Importer side of a transport.

    Each method raises PeerLostError when the peer is gone, and HandleRefusedError when it has no
    such memory. A read that was posted goes on until `poll` says True or raises: it cannot be
    cancelled, and may write until then.
    """

    transport: str

    def open(self, pool: PagePool, landing: NDArray[np.uint64]) -> None:
        """Make `pool` and `landing` (host memory) targets of reads."""

    def connect(self, agent: str, metadata: bytes) -> None:
        """Add a peer. Does not wait for it."""

    def disconnect(self, agent: str) -> None:
        """Forget a peer, with nothing of it in flight."""

    def read_pages(self, agent: str, payload: Sequence[Span]) -> object:
        """Post a read of pages into the pool; a token for `poll`."""

    def read_counter(self, agent: str, local: int, remote: int, notification: bytes) -> object:
        """Post a read of one counter into `landing`; the peer is notified after it is done."""

    def poll(self, read: object) -> bool:
        """Whether `read` is done. It has ended, and is freed, on True and when this raises."""

    def notify(self, agent: str, payload: bytes) -> None:
        """Send a notification, without knowing whether it arrives."""

    def close(self) -> None:
        """Stop, and end what is still in flight."""


def as_configuration_error(error: Exception) -> SplitscribeError:
    """What a transport that cannot start is reported as."""
    if isinstance(error, SplitscribeError):
        return error
    return ConfigurationError(f"the KV transport could not start: {error!r}")

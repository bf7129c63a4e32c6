"""What a decoder tells an encoder about leases, as short texts that ride on the transport.

`REL:<lease>`: the handle is not wanted. `REL:<lease>:<us>:<us>`: it was read in so many
microseconds, and the reader takes so long to project a window. `REN:<lease>,<lease>`: keep these
alive. Whoever knows a lease's nonce may send it; everything else in a notification is untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

MAX_NOTIFICATION_BYTES = 7_000  # NIXL delivers up to 8 KB
_LEASE_BYTES = 33  # 32 hex digits and a comma
_LEASES_PER_NOTIFICATION = (MAX_NOTIFICATION_BYTES - 4) // _LEASE_BYTES
_RENEWAL = re.compile(rb"REN:([0-9a-f]{32}(?:,[0-9a-f]{32})*)")
_RELEASE = re.compile(rb"REL:([0-9a-f]{32})(?::([0-9]{1,9}):([0-9]{1,9}))?")
_MAX_US = 999_999_999  # nine digits


class Notification(NamedTuple):
    """What a peer asks for. A release has one lease, and `times_s` where it was read.

    times_s: of the READ and of a projection, as in `cluster.kv.transfer_config.ReadReport`.
    """

    kind: Literal["REL", "REN"]
    leases: list[str]
    times_s: tuple[float, float] | None = None


def release_message(lease: str) -> bytes:
    return b"REL:" + lease.encode()


def read_message(lease: str, read_s: float, projection_s: float) -> bytes:
    """A release that tells how the READ went."""
    read_us, projection_us = (min(round(s * 1e6), _MAX_US) for s in (read_s, projection_s))
    return b"%b:%d:%d" % (release_message(lease), read_us, projection_us)


def renewal_messages(leases: Sequence[str]) -> Iterator[bytes]:
    """Renewals of all `leases`, in as few notifications as their size allows."""
    for start in range(0, len(leases), _LEASES_PER_NOTIFICATION):
        batch = leases[start : start + _LEASES_PER_NOTIFICATION]
        yield b"REN:" + ",".join(batch).encode()


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

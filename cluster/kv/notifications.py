"""What a decoder tells an encoder about leases, as short texts that ride on the transport.

`REL:<lease>`: the handle was read, or is not wanted. `REN:<lease>,<lease>`: keep these alive.
Whoever knows a lease's nonce may send it; everything else in a notification is untrusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

MAX_NOTIFICATION_BYTES = 7_000  # NIXL delivers up to 8 KB
_LEASE_BYTES = 33  # 32 hex digits and a comma
_LEASES_PER_NOTIFICATION = (MAX_NOTIFICATION_BYTES - 4) // _LEASE_BYTES
_RENEWAL = re.compile(rb"REN:([0-9a-f]{32}(?:,[0-9a-f]{32})*)")
_RELEASE = re.compile(rb"REL:([0-9a-f]{32})")


class Notification(NamedTuple):
    """What a peer asks for; a release has one lease."""

    kind: Literal["REL", "REN"]
    leases: list[str]


def release_message(lease: str) -> bytes:
    return b"REL:" + lease.encode()


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
        return Notification("REL", [match[1].decode()])
    return None

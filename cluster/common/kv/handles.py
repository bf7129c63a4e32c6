"""Signed handles, and notifications about their leases.

A handle is signed by HMAC-SHA256 over the `repr` of all other fields; nothing in it may be used
before the signature is checked. Notifications are `REL:<lease>`, which ends a lease, and
`REN:<lease>,<lease>`, which renews some; whoever knows a lease's nonce may send them.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from cluster.common.errors import HandleRefusedError
from cluster.common.messages import CrossKVHandle

_DOMAIN = b"splitscribe cross-kv handle v3\0"
_SIGNED = tuple(one.name for one in fields(CrossKVHandle) if one.name != "signature")
MAX_NOTIFICATION_BYTES = 7_000  # NIXL delivers up to 8 KB
_LEASE_BYTES = 33  # 32 hex digits and a comma
_LEASES_PER_NOTIFICATION = (MAX_NOTIFICATION_BYTES - 4) // _LEASE_BYTES
_NOTIFICATION = re.compile(rb"REL:[0-9a-f]{32}|REN:[0-9a-f]{32}(?:,[0-9a-f]{32})*")


def canonical_bytes(handle: CrossKVHandle) -> bytes:
    values = [getattr(handle, name) for name in _SIGNED]
    return _DOMAIN + repr(values).encode()


def sign(handle: CrossKVHandle, cluster_key: bytes) -> CrossKVHandle:
    return replace(handle, signature=_mac(handle, cluster_key))


def verify(handle: CrossKVHandle, cluster_key: bytes) -> None:
    """Raise HandleRefusedError if the handle was altered, is signed by another key, or is none."""
    try:
        genuine = hmac.compare_digest(_mac(handle, cluster_key), handle.signature)
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise HandleRefusedError(f"not a KV handle: {error}") from error
    if not genuine:
        raise HandleRefusedError(
            "the KV handle's signature is wrong: it was altered, or its sender has another "
            "cluster key"
        )


def _mac(handle: CrossKVHandle, cluster_key: bytes) -> bytes:
    return hmac.digest(cluster_key, canonical_bytes(handle), "sha256")


def release_message(lease: str) -> bytes:
    return b"REL:" + lease.encode()


def renewal_messages(leases: Sequence[str]) -> Iterator[bytes]:
    for start in range(0, len(leases), _LEASES_PER_NOTIFICATION):
        batch = leases[start : start + _LEASES_PER_NOTIFICATION]
        yield b"REN:" + ",".join(batch).encode()


def parse_notification(payload: bytes) -> tuple[str, list[str]] | None:
    """Kind (REL or REN) and leases; None if the payload is none of ours."""
    if len(payload) > MAX_NOTIFICATION_BYTES or not _NOTIFICATION.fullmatch(payload):
        return None
    kind, _, leases = payload.decode().partition(":")
    return kind, leases.split(",")

"""Signed handles, and what is told about their leases.

A handle names memory that a peer will read, so nothing in it may be used before its signature is
checked: HMAC-SHA256 over every other field by `repr`, in which no type passes for another. A
decoder tells an encoder about leases by texts that ride on the transport: `REL:<lease>`, read or
not wanted; `REN:<lease>,<lease>`, keep alive. Whoever knows a lease's nonce may send it.
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
    """Raise HandleRefusedError where it was altered, signed with another key, or is none."""
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
    """What a peer asks for, REL or REN, and of which leases; None: the payload is none of ours."""
    if len(payload) > MAX_NOTIFICATION_BYTES or not _NOTIFICATION.fullmatch(payload):
        return None
    kind, _, leases = payload.decode().partition(":")
    return kind, leases.split(",")

"""Signing and verifying `CrossKVHandle`: HMAC-SHA256 over every other field.

A handle names memory that a peer will read, so nothing in it may be used before its signature is
checked. The signed text is canonical: JSON of the fields in a fixed order, integers and floats as
Python writes them, bytes as hex. Knows nothing of pools or transports.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import replace

from cluster.errors import HandleRefusedError
from cluster.messages import CrossKVHandle

_DOMAIN = b"splitscribe cross-kv handle v2\0"
_as_json = json.JSONEncoder(separators=(",", ":")).encode  # made once: it costs as much as a text


def canonical_bytes(handle: CrossKVHandle) -> bytes:
    """What is signed: every field but the signature, unambiguous and stable across processes."""
    fields = [
        handle.request_id,
        int(handle.window),
        int(handle.attempt),
        handle.agent,
        handle.metadata.hex(),
        handle.layout_hash,
        [int(address) for address in handle.addresses],
        int(handle.page_bytes),
        int(handle.frames),
        int(handle.counter_address),
        int(handle.generation),
        handle.lease,
        float(handle.remaining_s),
        handle.payload,
    ]
    return _DOMAIN + _as_json(fields).encode()


def sign(handle: CrossKVHandle, cluster_key: bytes) -> CrossKVHandle:
    """A copy of `handle` with its signature filled in."""
    return replace(handle, signature=_mac(handle, cluster_key))


def verify(handle: CrossKVHandle, cluster_key: bytes) -> None:
    """Check the signature in constant time.

    Raises:
        HandleRefusedError: it was signed with another key, altered, or is no handle at all.
    """
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

"""Handles: whatever is altered is refused. Notifications: what is none of ours is dropped."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from cluster.common.errors import HandleRefusedError
from cluster.common.kv.handles import (
    MAX_NOTIFICATION_BYTES,
    canonical_bytes,
    parse_notification,
    release_message,
    renewal_messages,
    sign,
    verify,
)
from cluster.common.kv.wire import TransferConfig
from cluster.common.messages import CrossKVHandle

KEY = b"key"
LEASE = "00112233445566778899aabbccddeeff"
HANDLE = CrossKVHandle(
    request_id='req-"1",2',
    window=3,
    attempt=1,
    agent="encoder-0-77-abcd",
    metadata=b"\x00\xffconnection",
    layout_hash="0123456789abcdef",
    addresses=(1 << 46, (1 << 46) + 4096),
    page_bytes=4096,
    frames=1500,
    counter_address=1 << 45,
    generation=(1 << 62) + 5,
    lease=LEASE,
    remaining_s=10.0,
)


def altered(value: Any) -> Any:
    if isinstance(value, tuple):
        return value[::-1]
    return value[:-1] if isinstance(value, str | bytes) else value + 1


def test_a_signed_handle_is_accepted_after_a_journey() -> None:
    verify(pickle.loads(pickle.dumps(sign(HANDLE, KEY))), KEY)


@pytest.mark.parametrize("field", [f.name for f in fields(CrossKVHandle)])
def test_any_altered_field_is_refused(field: str) -> None:
    signed = sign(HANDLE, KEY)
    with pytest.raises(HandleRefusedError, match="signature"):
        verify(replace(signed, **{field: altered(getattr(signed, field))}), KEY)


def test_another_key_is_refused() -> None:
    with pytest.raises(HandleRefusedError, match="signature"):
        verify(sign(HANDLE, b"other"), KEY)


@pytest.mark.parametrize(
    "nonsense",
    [
        None,
        "a handle",
        replace(HANDLE, signature=None),
        replace(HANDLE, signature="text \u00e9"),
        replace(sign(HANDLE, KEY), addresses=list(HANDLE.addresses)),
        replace(sign(HANDLE, KEY), metadata=HANDLE.metadata.hex()),
        replace(sign(HANDLE, KEY), window="3"),
        replace(sign(HANDLE, KEY), lease=LEASE.encode()),
    ],
)
def test_what_is_no_handle_is_refused_and_never_crashes(nonsense: Any) -> None:
    with pytest.raises(HandleRefusedError):
        verify(nonsense, KEY)


def test_the_signed_text_is_unambiguous_and_stable() -> None:
    shifted = replace(HANDLE, request_id='req-"1"', lease=",2" + HANDLE.lease)
    assert canonical_bytes(shifted) != canonical_bytes(HANDLE)
    assert canonical_bytes(replace(HANDLE, window=np.int64(3))) != canonical_bytes(HANDLE)
    assert canonical_bytes(sign(HANDLE, KEY)) == canonical_bytes(HANDLE)


@pytest.mark.parametrize("key", [b"", "text", None])
def test_an_empty_key_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="cluster_key"):
        TransferConfig(key, "encoder")


def test_messages_come_back_as_they_were_sent() -> None:
    assert parse_notification(release_message(LEASE)) == ("REL", [LEASE])
    leases = [f"{n:032x}" for n in range(1000)]
    messages = list(renewal_messages(leases))
    assert all(len(message) <= MAX_NOTIFICATION_BYTES for message in messages)
    received: list[str] = []
    for message in messages:
        parsed = parse_notification(message)
        assert parsed is not None
        assert parsed[0] == "REN"
        received += parsed[1]
    assert received == leases
    assert list(renewal_messages([])) == []


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"REL:",
        b"REN:",
        b"REL:" + LEASE.upper().encode(),
        b"REL:" + LEASE.encode() + b"\n",
        b"REL:" + LEASE.encode() * 2,
        b"REL:" + LEASE.encode() + b":",
        b"REL:" + LEASE.encode() + b"," + LEASE.encode(),
        b"REN:" + LEASE.encode() + b",",
        b"DEL:" + LEASE.encode(),
        b"REN:" + b",".join([LEASE.encode()] * 300),
        b"\xff\xfe" * 100,
    ],
)
def test_anything_else_is_none_of_ours(payload: bytes) -> None:
    assert parse_notification(payload) is None

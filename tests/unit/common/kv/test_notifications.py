"""Notifications stay small, and anything that is not one of ours is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.common.kv.handles import (
    MAX_NOTIFICATION_BYTES,
    parse_notification,
    release_message,
    renewal_messages,
)

LEASE = "00112233445566778899aabbccddeeff"


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
        b"REL:" + LEASE.encode() + b":1",
        b"REL:" + LEASE.encode() + b":-1:2",
        b"REL:" + LEASE.encode() + b":1:" + b"9" * 10,
        b"REN:" + LEASE.encode() + b":1:2",
        b"REL:" + LEASE.encode() + b"," + LEASE.encode(),
        b"REN:" + LEASE.encode() + b",",
        b"DEL:" + LEASE.encode(),
        b"REN:" + b",".join([LEASE.encode()] * 300),
        b"\xff\xfe" * 100,
    ],
)
def test_anything_else_is_none_of_ours(payload: bytes) -> None:
    assert parse_notification(payload) is None


@given(st.binary(max_size=200))
def test_no_payload_crashes_the_parser(payload: bytes) -> None:
    parse_notification(payload)

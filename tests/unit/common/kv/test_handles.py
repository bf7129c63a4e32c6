"""Handles: whatever is altered is refused, and what is signed is the same in every process."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from cluster.common.errors import HandleRefusedError
from cluster.common.kv.handles import canonical_bytes, sign, verify
from cluster.common.kv.wire import TransferConfig
from cluster.common.messages import CrossKVHandle

KEY = b"key"
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
    lease="00112233445566778899aabbccddeeff",
    remaining_s=10.0,
)
ALTERED: dict[str, Any] = {
    "request_id": 'req-"1"',
    "window": 4,
    "attempt": 2,
    "agent": "encoder-1-77-abcd",
    "metadata": b"\x00\xffconnectiom",
    "layout_hash": "0123456789abcdee",
    "addresses": ((1 << 46) + 4096, 1 << 46),
    "page_bytes": 8192,
    "frames": 1499,
    "counter_address": 1 << 44,
    "generation": (1 << 62) + 6,
    "lease": "00112233445566778899aabbccddee00",
    "remaining_s": 10.5,
    "payload": "encoder_states",
    "signature": b"\0" * 32,
}


def test_a_signed_handle_is_accepted_after_a_journey() -> None:
    verify(pickle.loads(pickle.dumps(sign(HANDLE, KEY))), KEY)


@pytest.mark.parametrize("field", [f.name for f in fields(CrossKVHandle)])
def test_any_altered_field_is_refused(field: str) -> None:
    signed = sign(HANDLE, KEY)
    with pytest.raises(HandleRefusedError, match="signature"):
        verify(replace(signed, **{field: ALTERED[field]}), KEY)


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
        replace(HANDLE, addresses=None),
        replace(HANDLE, metadata="text"),
        replace(HANDLE, window="three"),
        replace(HANDLE, lease=b"bytes"),
    ],
)
def test_what_is_no_handle_is_refused_and_never_crashes(nonsense: Any) -> None:
    with pytest.raises(HandleRefusedError):
        verify(nonsense, KEY)


def test_the_signed_text_is_unambiguous_and_stable() -> None:
    shifted = replace(HANDLE, request_id='req-"1"', lease=",2" + HANDLE.lease)
    assert canonical_bytes(shifted) != canonical_bytes(HANDLE)
    assert canonical_bytes(replace(HANDLE, remaining_s=10)) == canonical_bytes(HANDLE)
    assert canonical_bytes(sign(HANDLE, KEY)) == canonical_bytes(HANDLE)


@pytest.mark.parametrize("key", [b"", "text", None])
def test_an_empty_key_is_refused(key: Any) -> None:
    with pytest.raises(ValueError, match="cluster_key"):
        TransferConfig(key, "encoder")

"""What is forged, replayed or unknown is refused and counted, on every transport."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cluster.common.errors import HandleRefusedError, KVLostError, StaleGenerationError
from cluster.common.kv.handles import sign
from cluster.common.messages import CrossKVHandle
from tests.support.kv.host import (
    DEADLINE_S,
    KEY,
    MakeHost,
    allocate,
    kv_of,
    take,
    wait_for,
)

UNKNOWN = "0" * 32


def notify(importer: Any, handle: CrossKVHandle, *messages: bytes) -> None:
    """Send notifications of one's own choice, as a peer that is none of ours could."""
    for message in messages:
        wire = importer._wire
        importer._submit(partial(wire.notify, handle.agent, message))


def test_forged_handles_are_counted(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(), make_reader()
    handle = host.publish(1)
    for forged in (
        replace(handle, signature=b"\0" * 32),
        replace(handle, lease=UNKNOWN),
        replace(handle, counter_address=0),
        sign(handle, b"another cluster's key"),
    ):
        with pytest.raises(HandleRefusedError):
            importer.accept(forged)
    with pytest.raises(HandleRefusedError):
        importer.accept(sign(replace(handle, layout_hash="another"), KEY))
    assert importer.refused() == {"signature": 4, "layout": 1}
    assert torch.equal(take(importer, handle), kv_of(1, importer.layout))
    assert importer.refused() == {"signature": 4, "layout": 1}


def test_a_handle_serves_once(make_host: MakeHost, make_reader: MakeHost) -> None:
    """Twice at once, after it was read, and by another decoder: never the KV again."""
    host, importer, other = make_host(n_windows=1), make_reader(), make_reader()
    handle = host.publish(1)
    importer.accept(handle)
    first, second = allocate(importer), allocate(importer)
    reading = importer.fetch(handle, first)
    with pytest.raises(KVLostError):
        importer.fetch(handle, second).result(DEADLINE_S)
    reading.result(DEADLINE_S)
    assert importer.refused() == {"replayed": 1}
    wait_for(lambda: host.state().n_windows_free == 1, "the release")
    for reader in (importer, other):
        with pytest.raises(StaleGenerationError):
            take(reader, handle)
        assert reader.refused()["stale"] == 1
    handle = host.publish(2)  # what the pages hold now is not for the old handle
    assert torch.equal(take(other, handle), kv_of(2, other.layout))


def test_unknown_notifications_are_counted_and_change_nothing(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader()
    handle = host.publish(1)
    importer.accept(handle)  # connects
    strays = (b"", b"REL", b"REL:" + handle.lease[:-1].encode(), b"\xff" * 100, b"GET / HTTP/1.1")
    notify(importer, handle, *strays)
    notify(importer, handle, f"REL:{UNKNOWN}".encode(), f"REN:{UNKNOWN}".encode())

    def counted() -> bool:
        state = host.state()
        return (state.n_malformed, state.n_ignored) == (len(strays), 2)

    wait_for(counted, "all that was sent")
    assert host.state().n_leases == 1
    assert torch.equal(take(importer, handle), kv_of(1, importer.layout))

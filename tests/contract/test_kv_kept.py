"""The contract of KV that is kept after its release; the same for every transport."""

from __future__ import annotations

import pytest
import torch

from cluster.common.errors import KVLostError, StaleGenerationError
from tests.support.kv.host import (
    DEADLINE_S,
    MakeHost,
    allocate,
    kv_of,
    pages_of,
    take,
)
from tests.support.waiting import wait_until

KEY = b"a"


def test_kept_kv_is_read_again_by_any_number_of_readers(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, readers = make_host(n_windows=2), [make_reader(), make_reader()]
    expected = kv_of(1, readers[0].layout)
    assert torch.equal(take(readers[0], host.publish(1, KEY)), expected)
    wait_until(lambda: host.state().n_kept == 1)
    handles = [host.publish_again(KEY) for _ in range(6)]
    assert len({handle.lease for handle in handles}) == 6
    assert host.state().n_windows_free == 1, "who is read is not free"
    for number, handle in enumerate(handles):
        assert torch.equal(take(readers[number % 2], handle), expected)
    wait_until(lambda: host.state().n_leases == 0)
    assert (host.state().n_kept, host.state().n_windows_free) == (1, 2)
    host.check_integrity()


def test_an_evicted_window_is_stale_for_whoever_still_has_its_handle(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, reader = make_host(n_windows=1), make_reader()
    old = host.publish(1, KEY)
    assert host.revoke(old.lease)
    assert torch.equal(take(reader, host.publish_again(KEY)), kv_of(1, reader.layout))
    wait_until(lambda: host.state().n_kept == 1)
    new = host.publish(2, b"b")
    assert host.publish_again(KEY) is None
    assert host.state().n_evicted == 1
    with pytest.raises(StaleGenerationError):
        take(reader, old)
    assert torch.equal(take(reader, new), kv_of(2, reader.layout))
    wait_until(lambda: host.state().n_leases == 0)
    host.check_integrity()


def test_evictions_beside_reads_in_flight_never_give_another_window_s_kv(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    """Every second lease ends while its READ is in flight, and others need the pages at once."""
    host, reader = make_host(n_windows=2), make_reader(n_windows=8)
    n_lost = 0
    for turn in range(24):
        seed = turn % 5
        key = bytes([seed])
        handle = host.publish_again(key) or host.publish(seed, key)
        reader.accept(handle)
        pages = allocate(reader)
        reading = reader.fetch(handle, pages)
        if turn % 2:
            host.revoke(handle.lease)
            for other in (10 + turn, 50 + turn):  # both windows of the pool
                host.revoke(host.publish(other, bytes([other])).lease)
        try:
            reading.result(DEADLINE_S)
            assert torch.equal(pages_of(reader, pages), kv_of(seed, reader.layout))
        except KVLostError:
            n_lost += 1
        reader.pool.release(pages)
        wait_until(lambda: host.state().n_leases == 0)
        host.check_integrity()
    assert n_lost <= 12
    assert host.state().n_evicted > 12
    reader.pool.check_integrity()

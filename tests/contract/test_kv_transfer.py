"""The contract of KVExporter and KVImporter while all goes well, the same for every transport."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.common.errors import (
    HandleRefusedError,
    KVLostError,
    LayoutMismatchError,
    StaleGenerationError,
)
from cluster.common.kv.handles import sign
from cluster.common.messages import CrossKVHandle
from tests.support.kv.host import (
    DEADLINE_S,
    KEY,
    MakeHost,
    allocate,
    kv_of,
    over_sockets_too,
    pages_of,
    take,
)
from tests.support.waiting import wait_until


@over_sockets_too
def test_bytes_are_equal_and_the_release_frees(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(), make_reader()
    for seed in range(3):
        assert torch.equal(take(importer, host.publish(seed)), kv_of(seed, importer.layout))
    wait_until(lambda: host.state().n_windows_free == 4)
    assert host.state().n_leases == 0
    assert host.state().n_ignored == 0
    assert not any(peer.leases for peer in importer._reader._peers.values())
    importer.pool.check_integrity()


@over_sockets_too
def test_the_transport_is_what_kv_was_read_by(
    mode: str, make_host: MakeHost, make_reader: MakeHost
) -> None:
    """Not whatever else a connection has: on a GPU nothing that goes by the host's memory."""
    host, importer = make_host(), make_reader()
    take(importer, host.publish(0))
    found = {"nixl-tcp": ["nixl/tcp"], "nixl-cuda": ["nixl/cuda_ipc"]}.get(mode)
    if mode.startswith("memory"):
        found = ["memory"]
    assert importer.transport in (found or ["nixl/cma", "nixl/tcp"])


@pytest.mark.parametrize("frames", [1, 320, 375, 1499])
def test_a_trimmed_window_moves_only_what_it_fills(
    make_host: MakeHost, make_reader: MakeHost, frames: int
) -> None:
    host, importer = make_host(), make_reader()
    layout, pool = importer.layout, importer.pool
    pool.tensor.fill_(torch.nan)
    handle = host.publish(3, b"", frames)
    assert handle.frames == frames
    importer.accept(handle)
    pages = pool.allocate(layout.pages_for(frames))
    stats = importer.fetch(handle, pages).result(DEADLINE_S)
    of_page = layout.page_bytes
    if layout.pages_per_window == 1:
        of_page = of_page * frames // layout.n_frames
    assert stats.n_bytes == len(pages) * of_page
    n_items = of_page // pool.tensor.itemsize
    found, sent = pages_of(importer, pages).flatten(1), kv_of(3, layout)[: len(pages)].flatten(1)
    assert torch.equal(found[:, :n_items], sent[:, :n_items])
    assert found[:, n_items:].isnan().all()
    untouched = sorted(set(range(pool.n_pages)) - set(pages))
    assert pages_of(importer, untouched).isnan().all()
    wait_until(lambda: host.state().n_windows_free == 4)
    pool.release(pages)
    pool.check_integrity()


def test_many_transfers_at_once_into_scattered_pages(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    hosts = [make_host(n_windows=8), make_host(n_windows=8)]
    importer = make_reader(n_windows=17)
    for page in allocate(importer, 17)[1::2]:  # leaves no two neighbours free
        importer.pool.release([page])
    scattered = allocate(importer, 8)
    window = importer.layout.pages_per_window
    for page in set(range(window * 17)) - set(scattered):
        if page % 2 == 0:
            importer.pool.release([page])
    in_flight = []
    for seed in range(16):
        handle = hosts[seed % 2].publish(seed)
        importer.accept(handle)
        own = scattered[seed * window : (seed + 1) * window]
        pages = own if seed < 8 else allocate(importer)
        in_flight.append((seed, pages, importer.fetch(handle, pages)))
    for seed, pages, future in in_flight:
        future.result(DEADLINE_S)
        assert torch.equal(pages_of(importer, pages), kv_of(seed, importer.layout))
        importer.pool.release(pages)
    importer.pool.check_integrity()
    for host in hosts:
        wait_until(lambda host=host: host.state().n_windows_free == 8)


def test_fetches_from_many_threads(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(n_windows=4), make_reader(n_windows=4)
    publishing = threading.Lock()

    def work(first: int) -> None:
        for seed in range(first, first + 5):
            with publishing:
                handle = host.publish(seed)
            assert torch.equal(take(importer, handle), kv_of(seed, importer.layout)), seed

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(0, 40, 10)))
    importer.pool.check_integrity()


def test_renewals_keep_a_lease_and_a_drop_ends_it(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(lease_s=1.5), make_reader(renew_s=0.15)
    handle, unused = host.publish(1), host.publish(2)
    importer.accept(handle)
    importer.accept(unused)
    lost = host.publish(3)
    wait_until(lambda: host.state().n_windows_free == 2)
    begin = time.monotonic()
    while time.monotonic() - begin < 2.0:  # well over a lease
        assert host.state().n_leases == 2
        time.sleep(0.05)
    importer.drop(unused)
    importer.drop(unused)
    wait_until(lambda: host.state().n_windows_free == 3)
    assert torch.equal(take(importer, handle), kv_of(1, importer.layout))
    importer.drop(handle)
    with pytest.raises(KVLostError):
        importer.fetch(unused, allocate(importer)).result(DEADLINE_S)
    with pytest.raises(StaleGenerationError):
        take(importer, lost)


def test_a_stale_generation_is_detected(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(n_windows=1), make_reader()
    with pytest.raises(StaleGenerationError):
        take(importer, host.publish_stale(5))
    assert torch.equal(take(importer, host.publish(7)), kv_of(7, importer.layout))
    handle = host.publish(8)
    importer.accept(handle)
    assert host.revoke(handle.lease)
    assert not host.revoke(handle.lease)
    with pytest.raises(StaleGenerationError):
        importer.fetch(handle, allocate(importer)).result(DEADLINE_S)
    wait_until(lambda: host.state().n_windows_free == 1)


def test_a_handle_dropped_while_it_is_fetched_never_gives_wrong_bytes(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader()
    for seed in range(10):
        handle = host.publish(seed)
        importer.accept(handle)
        pages = allocate(importer)
        future = importer.fetch(handle, pages)
        importer.drop(handle)
        error = future.exception(DEADLINE_S)
        assert error is None or isinstance(error, StaleGenerationError)
        if error is None:
            assert torch.equal(pages_of(importer, pages), kv_of(seed, importer.layout))
        importer.pool.release(pages)
    wait_until(lambda: host.state().n_windows_free == 4)


def own_state() -> tuple[int, int]:
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return rss_pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


def test_nothing_leaks_over_1000_hand_offs(make_host: MakeHost, make_reader: MakeHost) -> None:
    """Pages, memory and file handles of both sides are as they were after the first 100."""
    host, importer = make_host(n_windows=8), make_reader()
    pages = allocate(importer)

    def hand_off(seed: int) -> None:
        handle = host.publish(seed)
        importer.accept(handle)
        importer.fetch(handle, pages).result(DEADLINE_S)

    for seed in range(100):
        hand_off(seed)
    before = host.state()
    rss, n_files = own_state()
    for seed in range(900):
        hand_off(seed)
    wait_until(lambda: host.state().n_windows_free == 8)
    importer.pool.release(pages)
    importer.pool.check_integrity()
    after = host.state()
    rss_after, n_files_after = own_state()
    assert after.n_files <= before.n_files
    assert n_files_after <= n_files
    assert after.rss_bytes - before.rss_bytes < 8_000_000
    assert rss_after - rss < 8_000_000
    assert after.n_ignored == 0


UNKNOWN = "0" * 32


def notify(importer: Any, handle: CrossKVHandle, *messages: bytes) -> None:
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
    another = replace(handle, layout_hash="another")
    with pytest.raises(HandleRefusedError, match="signature"):  # checked before the layout
        importer.accept(another)
    for wrong, why in (
        (another, "layout"),
        (replace(handle, frames=0), "frames"),
        (replace(handle, frames=1501), "frames"),
        (replace(handle, addresses=(*handle.addresses, handle.addresses[0])), "frames"),
        (replace(handle, addresses=()), "frames"),
    ):
        with pytest.raises(LayoutMismatchError, match=why):
            importer.accept(sign(wrong, KEY))
    assert importer.refused() == {"signature": 5, "layout": 5}
    assert torch.equal(take(importer, handle), kv_of(1, importer.layout))
    assert importer.refused() == {"signature": 5, "layout": 5}


def test_a_handle_serves_once(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer, other = make_host(n_windows=1), make_reader(), make_reader()
    handle = host.publish(1)
    importer.accept(handle)
    first, second = allocate(importer), allocate(importer)
    reading = importer.fetch(handle, first)
    assert not reading.cancel()
    with pytest.raises(KVLostError):
        importer.fetch(handle, second).result(DEADLINE_S)
    reading.result(DEADLINE_S)
    with pytest.raises(KVLostError):
        importer.fetch(handle, second).result(DEADLINE_S)
    assert importer.refused() == {"replayed": 2}
    wait_until(lambda: host.state().n_windows_free == 1)
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

    wait_until(counted)
    assert host.state().n_leases == 1
    assert torch.equal(take(importer, handle), kv_of(1, importer.layout))

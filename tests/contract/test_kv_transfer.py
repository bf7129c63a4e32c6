"""The contract of KVExporter and KVImporter, the same for every transport.

memory runs in this process; nixl has the exporter in a process of its own (shared memory), and
nixl-tcp the same over sockets, as between hosts.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.errors import (
    HandleRefusedError,
    KVLostError,
    PeerLostError,
    StaleGenerationError,
    TransferTimeoutError,
    WorkerDrainingError,
)
from cluster.kv.connect import available_transport, make_importer
from cluster.kv.handles import sign
from cluster.kv.transfer import LEASE_S
from cluster.messages import CrossKVHandle

sys.path.insert(0, str(Path(__file__).parent))

from kv_host import KEY, LAYOUT, WINDOW, EncoderProcess, LocalHost, ProcessHost, kv_of

DEADLINE_S = 30.0


MakeHost = Callable[..., Any]


@pytest.fixture(scope="module")
def processes() -> Iterator[list[EncoderProcess]]:
    """Encoder processes that are free; a test takes some and gives back those that still run."""
    free: list[EncoderProcess] = []
    yield free
    for process in free:
        process.end()


@pytest.fixture(params=["memory", "nixl", "nixl-tcp"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "memory" and available_transport() != "nixl":
        pytest.skip("NIXL does not load on this machine")
    if request.param == "nixl-tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    return str(request.param)


@pytest.fixture
def transport(mode: str) -> str:
    return mode.partition("-")[0]


@pytest.fixture
def make_host(mode: str, processes: list[EncoderProcess]) -> Iterator[MakeHost]:
    hosts: list[Any] = []
    taken: list[EncoderProcess] = []
    environment = {"UCX_TLS": "tcp"} if mode == "nixl-tcp" else {}

    def make(n_windows: int = 4, lease_s: float = LEASE_S) -> Any:
        if mode == "memory":
            hosts.append(LocalHost("memory", n_windows, lease_s))
        else:
            taken.append(processes.pop() if processes else EncoderProcess())
            hosts.append(ProcessHost(taken[-1], n_windows, lease_s, environment))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()
    for process in taken:
        if process.alive:
            processes.append(process)
        else:
            process.end()


@pytest.fixture
def make_reader(transport: str) -> Iterator[MakeHost]:
    importers = []

    def make(n_windows: int = 4, **settings: Any) -> Any:
        settings = {"cluster_key": KEY, "layout": LAYOUT, **settings}
        layout = settings.pop("layout")
        importer = make_importer(transport, layout, n_windows * layout.pages_per_window, **settings)
        importers.append(importer)
        return importer

    yield make
    for importer in importers:
        importer.close()


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def take(importer: Any, handle: CrossKVHandle) -> torch.Tensor:
    """Accept, fetch, copy out, release."""
    importer.accept(handle)
    pages = importer.pool.allocate(WINDOW)
    try:
        stats = importer.fetch(handle, pages).result(DEADLINE_S)
        assert stats.n_bytes == WINDOW * LAYOUT.page_bytes
        return importer.pool.tensor[list(pages)].clone()
    finally:
        if importer.pool.n_quarantined == 0:
            importer.pool.release(pages)


def test_bytes_are_equal_and_the_release_frees(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(), make_reader()
    for seed in range(3):
        assert torch.equal(take(importer, host.publish(seed)), kv_of(seed))
    wait_for(lambda: host.state().n_free == 4 * WINDOW, "all pages free after the releases")
    assert host.state().n_leases == 0
    assert host.state().n_ignored == 0
    assert importer.n_held == 0
    importer.pool.check_integrity()


def test_many_transfers_at_once_into_scattered_pages(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    hosts = [make_host(n_windows=8), make_host(n_windows=8)]
    importer = make_reader(n_windows=17)
    for page in importer.pool.allocate(WINDOW * 17)[1::2]:  # leaves no two neighbours free
        importer.pool.release([page])
    scattered = importer.pool.allocate(WINDOW * 8)
    for page in set(range(WINDOW * 17)) - set(scattered):
        if page % 2 == 0:
            importer.pool.release([page])
    in_flight = []
    for seed in range(16):
        handle = hosts[seed % 2].publish(seed)
        importer.accept(handle)
        if seed < 8:
            pages = scattered[seed * WINDOW : (seed + 1) * WINDOW]
        else:
            pages = importer.pool.allocate(WINDOW)
        in_flight.append((seed, pages, importer.fetch(handle, pages)))
    for seed, pages, future in in_flight:
        future.result(DEADLINE_S)
        assert torch.equal(importer.pool.tensor[list(pages)], kv_of(seed))
        importer.pool.release(pages)
    importer.pool.check_integrity()
    for host in hosts:
        wait_for(lambda host=host: host.state().n_free == 8 * WINDOW, "pages free")


def test_fetches_from_many_threads(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(n_windows=4), make_reader(n_windows=4)
    publishing = threading.Lock()
    wrong: list[str] = []

    def work(first: int) -> None:
        for seed in range(first, first + 5):
            with publishing:
                handle = host.publish(seed)
            if not torch.equal(take(importer, handle), kv_of(seed)):
                wrong.append(f"window {seed}")

    threads = [threading.Thread(target=work, args=(n * 10,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert not wrong
    importer.pool.check_integrity()


def test_a_lease_that_nobody_renews_expires(make_host: MakeHost) -> None:
    """A lost reply: with the real lease of LEASE_S pages are free within 15 s."""
    host = make_host(lease_s=0.3)
    host.publish(1)
    assert host.state().n_free == 3 * WINDOW
    wait_for(lambda: host.state().n_free == 4 * WINDOW, "the lease expired")
    assert LEASE_S <= 10.0


def test_renewals_keep_a_lease_and_a_drop_ends_it(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(lease_s=1.0), make_reader(renew_s=0.1)
    handle, unused = host.publish(1), host.publish(2)
    importer.accept(handle)
    importer.accept(unused)
    lost = host.publish(3)
    wait_for(lambda: host.state().n_free == 2 * WINDOW, "the lease nobody accepted expired")
    begin = time.monotonic()
    while time.monotonic() - begin < 1.5:  # well over a lease
        assert host.state().n_leases == 2
        time.sleep(0.05)
    importer.drop(unused)
    importer.drop(unused)
    wait_for(lambda: host.state().n_free == 3 * WINDOW, "the dropped handle's pages are free")
    assert torch.equal(take(importer, handle), kv_of(1))
    importer.drop(handle)
    with pytest.raises(KVLostError):
        importer.fetch(unused, importer.pool.allocate(WINDOW)).result(DEADLINE_S)
    with pytest.raises(StaleGenerationError):
        take(importer, lost)


def test_a_stale_generation_is_detected(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(n_windows=1), make_reader()
    with pytest.raises(StaleGenerationError):
        take(importer, host.publish_stale(5))
    assert torch.equal(take(importer, host.publish(7)), kv_of(7))
    handle = host.publish(8)
    importer.accept(handle)
    assert host.revoke(handle.lease)
    assert not host.revoke(handle.lease)
    with pytest.raises(StaleGenerationError):
        importer.fetch(handle, importer.pool.allocate(WINDOW)).result(DEADLINE_S)
    wait_for(lambda: host.state().n_free == WINDOW, "pages free")


def test_a_handle_dropped_while_it_is_fetched_never_gives_wrong_bytes(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader()
    for seed in range(10):
        handle = host.publish(seed)
        importer.accept(handle)
        pages = importer.pool.allocate(WINDOW)
        future = importer.fetch(handle, pages)
        importer.drop(handle)
        error = future.exception(DEADLINE_S)
        assert error is None or isinstance(error, StaleGenerationError)
        if error is None:
            assert torch.equal(importer.pool.tensor[list(pages)], kv_of(seed))
        importer.pool.release(pages)
    wait_for(lambda: host.state().n_free == 4 * WINDOW, "pages free")


def test_wrong_signature_and_wrong_layout_are_refused(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader()
    handle = host.publish(1)
    for forged in (
        replace(handle, signature=b""),
        replace(handle, addresses=handle.addresses[::-1]),
        replace(handle, remaining_s=handle.remaining_s + 1),
        sign(handle, b"another key"),
    ):
        with pytest.raises(HandleRefusedError, match="signature"):
            importer.accept(forged)
    other = make_reader(layout=replace(LAYOUT, model="another checkpoint"))
    with pytest.raises(HandleRefusedError, match="layout"):
        other.accept(handle)
    with pytest.raises(HandleRefusedError, match="signature"):  # checked before the layout
        other.accept(replace(handle, layout_hash=other.layout.hash))
    assert torch.equal(take(importer, handle), kv_of(1))


def test_a_killed_peer_is_lost_within_10_s_and_a_new_one_works(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader()
    survivor = make_host()
    assert torch.equal(take(importer, host.publish(1)), kv_of(1))
    unread, waiting = host.publish(2), host.publish(3)
    importer.accept(unread)
    host.kill()
    begin = time.monotonic()
    with pytest.raises(PeerLostError):
        take(importer, unread)
    assert time.monotonic() - begin < 10.0
    with pytest.raises(PeerLostError):
        importer.accept(waiting)
    assert torch.equal(take(importer, survivor.publish(4)), kv_of(4))
    assert torch.equal(take(importer, make_host().publish(5)), kv_of(5))
    importer.pool.check_integrity()
    assert importer.healthy() is None


def test_a_peer_killed_during_a_read_is_lost(make_host: MakeHost, make_reader: MakeHost) -> None:
    """Frozen before the first contact, so that the read is surely in flight when it dies."""
    host, importer = make_host(), make_reader()
    handle, other = host.publish(1), host.publish(2)
    host.freeze()
    importer.accept(handle)
    importer.accept(other)
    pages = [importer.pool.allocate(WINDOW) for _ in range(2)]
    futures = [importer.fetch(h, p) for h, p in zip((handle, other), pages, strict=True)]
    host.kill()
    begin = time.monotonic()
    for future in futures:
        assert isinstance(future.exception(DEADLINE_S), PeerLostError)
    assert time.monotonic() - begin < 10.0
    for page_set in pages:
        importer.pool.release(page_set)
    importer.pool.check_integrity()
    assert torch.equal(take(importer, make_host().publish(3)), kv_of(3))


def test_pages_of_an_overdue_read_are_quarantined_until_it_ends(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader(fetch_timeout_s=0.3)
    healthy_host = make_host()
    assert torch.equal(take(importer, healthy_host.publish(1)), kv_of(1))
    handle, other = host.publish(2), host.publish(3)
    host.freeze()
    importer.accept(handle)
    importer.accept(other)
    pages = [importer.pool.allocate(WINDOW) for _ in range(2)]
    futures = [importer.fetch(h, p) for h, p in zip((handle, other), pages, strict=True)]
    for future in futures:
        assert isinstance(future.exception(DEADLINE_S), TransferTimeoutError)
    assert importer.pool.n_quarantined == 2 * WINDOW
    importer.pool.check_integrity()
    assert "overdue" in importer.healthy()
    with pytest.raises(PeerLostError, match="does not answer"):
        importer.accept(handle)
    assert torch.equal(take_beside(importer, healthy_host.publish(4)), kv_of(4))

    host.thaw()
    wait_for(lambda: importer.pool.n_quarantined == 0, "the pages came back")
    importer.pool.check_integrity()
    assert importer.healthy() is None
    wait_for(lambda: accepts(importer, host.publish(6)), "the peer is trusted again")
    assert torch.equal(take(importer, host.publish(5)), kv_of(5))


def take_beside(importer: Any, handle: CrossKVHandle) -> torch.Tensor:
    """`take` while other pages are in quarantine."""
    importer.accept(handle)
    pages = importer.pool.allocate(WINDOW)
    importer.fetch(handle, pages).result(DEADLINE_S)
    copied = importer.pool.tensor[list(pages)].clone()
    importer.pool.release(pages)
    return copied


def accepts(importer: Any, handle: CrossKVHandle) -> bool:
    try:
        importer.accept(handle)
    except PeerLostError:
        return False
    importer.drop(handle)
    return True


def test_close_is_clean_and_ends_what_is_pending(
    make_host: MakeHost, make_reader: MakeHost
) -> None:
    host, importer = make_host(), make_reader()
    handle, held = host.publish(1), host.publish(2)
    assert torch.equal(take(importer, host.publish(3)), kv_of(3))
    importer.accept(handle)
    importer.accept(held)
    pages = importer.pool.allocate(WINDOW)
    future = importer.fetch(handle, pages)
    importer.close()
    importer.close()
    assert future.done()
    assert future.exception() is None  # what is in flight gets a moment to end
    assert torch.equal(importer.pool.tensor[list(pages)], kv_of(1))
    importer.pool.release(pages)
    importer.pool.check_integrity()
    with pytest.raises(WorkerDrainingError):
        importer.accept(held)
    assert importer.healthy() is not None
    wait_for(lambda: host.state().n_free == 4 * WINDOW, "close released every lease")


def test_close_with_a_read_that_never_ends(make_host: MakeHost, make_reader: MakeHost) -> None:
    host, importer = make_host(), make_reader(fetch_timeout_s=0.3)
    handle, late = host.publish(1), host.publish(2)
    host.freeze()
    importer.accept(handle)
    importer.accept(late)
    overdue = importer.fetch(handle, importer.pool.allocate(WINDOW))
    assert isinstance(overdue.exception(DEADLINE_S), TransferTimeoutError)
    begin = time.monotonic()
    importer.close()
    assert time.monotonic() - begin < 10.0
    importer.pool.check_integrity()


def own_state() -> tuple[int, int]:
    rss_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return rss_pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "mode", ["memory", "nixl", pytest.param("nixl-tcp", marks=pytest.mark.slow)], indirect=True
)
def test_nothing_leaks_over_1000_hand_offs(make_host: MakeHost, make_reader: MakeHost) -> None:
    """Pages, memory and file handles of both sides are as they were after the first 100."""
    host, importer = make_host(n_windows=8), make_reader()
    pages = importer.pool.allocate(WINDOW)

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
    wait_for(lambda: host.state().n_free == 8 * WINDOW, "all pages free")
    importer.pool.release(pages)
    importer.pool.check_integrity()
    after = host.state()
    rss_after, n_files_after = own_state()
    assert after.n_files <= before.n_files
    assert n_files_after <= n_files
    assert after.rss_bytes - before.rss_bytes < 8_000_000
    assert rss_after - rss < 8_000_000
    assert after.n_ignored == 0

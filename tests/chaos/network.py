"""A link between two hosts that cuts, delays and loses packets, for kernels without netem.

A userspace relay: each host reaches the other one's address by a TUN device only. Needs root.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.hosts import Host

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MAX_PACKET = 65_536
MAX_QUEUED = 10_000  # packets under way; more are lost, as in a real queue


class Link:
    def __init__(self, one: int, other: int) -> None:
        self.set()
        self._to = {one: other, other: one}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self, is_cut: bool = False, delay_s: float = 0.0, loss: float = 0.0) -> None:
        self.is_cut, self.delay_s, self.loss = is_cut, delay_s, loss

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        for descriptor in self._to:
            os.close(descriptor)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in self._to:
            poll.register(descriptor, select.POLLIN)
        rng = random.Random(0)
        order = itertools.count()
        under_way: list[tuple[float, int, int, bytes]] = []
        while not self._closing.is_set():
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 0.1
            for descriptor, _ in poll.poll(min(100.0, 1000 * wait_s)):
                try:
                    packet = os.read(descriptor, MAX_PACKET)
                except OSError:  # its host is down
                    continue
                is_lost = self.is_cut or len(under_way) > MAX_QUEUED or rng.random() < self.loss
                if not is_lost:
                    due_s = time.monotonic() + self.delay_s
                    to = self._to[descriptor]
                    heapq.heappush(under_way, (due_s, next(order), to, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(under_way)
                try:
                    os.write(to, packet)
                except OSError:  # that host is down
                    continue


@contextmanager
def link_between(one: Host, other: Host) -> Iterator[Link]:
    number = itertools.count()
    ends = []
    for here, there in ((one, other), (other, one)):
        name = f"relay{next(number)}"
        ends.append(_open_tun(here, name))
        # The host's own address there too: UCX takes a device by its route and its address.
        here.run(
            f"ip addr add {here.address}/32 dev {name}; ip link set {name} up; "
            f"ip route add {there.address}/32 dev {name} src {here.address}"
        )
    link = Link(*ends)
    try:
        yield link
    finally:
        link.close()


def _open_tun(host: Host, name: str) -> int:
    """A TUN device in the host's network; it lives as long as its descriptor."""
    opened: list[int] = []

    def open_there() -> None:  # in a thread, since a network namespace is a thread's
        with Path(f"/proc/{host.first_pid()}/ns/net").open() as namespace:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        descriptor = os.open("/dev/net/tun", os.O_RDWR)
        request = struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(descriptor, TUNSETIFF, request)
        opened.append(descriptor)

    thread = threading.Thread(target=open_there)
    thread.start()
    thread.join()
    if not opened:
        raise OSError(f"no TUN device on {host.name}")
    return opened[0]

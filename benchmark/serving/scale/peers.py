"""Peers of one NIXL agent, and what the importer does about those that it knows. Real NIXL.

Exporters are agents in processes of their own, several to a process, each with a small registered
region. One importer connects to all, reads a counter of each, and then reads again and again with
all of them known.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil

from benchmark.serving.scale.figures import Figure, cpu_us

PEERS = (16, 64, 192)
AGENTS_PER_PROCESS = 16
REGION_BYTES = 1 << 20
KNOWN = (10, 100, 500)
HELD = 64  # handles that a decoder holds


def measure() -> list[Figure]:
    return [*_agents(), *_registrations(), *_looks()]


def _serve_agents(pipe: Connection, count: int) -> None:
    """Other process: open agents, tell their metadata, and stay until told."""
    from cluster.kv.wires.nixl_agent import make_agent

    kept: list[Any] = []
    for number in range(count):
        agent, region = make_agent(f"target-{os.getpid()}-{number}"), np.zeros(REGION_BYTES, "u1")
        agent.register_memory([(region.ctypes.data, region.nbytes, 0, "")], "DRAM")
        kept.append((agent, region))
        pipe.send((agent.get_agent_metadata(), int(region.ctypes.data)))
    pipe.recv()
    os._exit(0)


def _agents() -> list[Figure]:
    """Memory, descriptors and time of each peer more."""
    from cluster.kv.wires.nixl_agent import make_agent

    figures = []
    for count in PEERS:
        context, targets, pipes = multiprocessing.get_context("spawn"), [], []
        for _ in range(count // AGENTS_PER_PROCESS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve_agents, args=(theirs, AGENTS_PER_PROCESS))
            process.start()
            targets.append(process)
            pipes.append(ours)
        try:
            told = [pipe.recv() for pipe in pipes for _ in range(AGENTS_PER_PROCESS)]
            agent = make_agent(f"importer-{count}")
            landing = np.zeros(8, "u8")
            agent.register_memory([(landing.ctypes.data, landing.nbytes, 0, "")], "DRAM")
            figures += _connect(agent, landing, told)
            del agent
        finally:
            for pipe in pipes:
                pipe.send(None)
            for process in targets:
                process.join()
    return sorted(figures, key=lambda figure: figure.what)


def _connect(agent: Any, landing: Any, told: list[tuple[bytes, int]]) -> list[Figure]:
    """What the peers cost together, by the peer."""
    gc.collect()
    process, count = psutil.Process(), len(told)
    rss, fds, began = process.memory_info().rss, process.num_fds(), time.perf_counter()
    names = [agent.add_remote_agent(metadata) for metadata, _ in told]
    for name, (_, address) in zip(names, told, strict=True):
        _read(agent, landing, name, address)
    seconds = time.perf_counter() - began
    rss_bytes = process.memory_info().rss - rss
    name, (_, address) = names[-1], told[-1]
    idle = process.cpu_times()
    time.sleep(2.0)
    after = process.cpu_times()
    idle_s = (after.user + after.system - idle.user - idle.system) / 2.0
    once = cpu_us(lambda: _read(agent, landing, name, address), 0.02)
    return [
        Figure("NIXL: memory of a peer", count, "KiB", None, rss_bytes / 1024 / count),
        Figure(
            "NIXL: descriptors of a peer", count, "files", None, (process.num_fds() - fds) / count
        ),
        Figure("NIXL: first contact and first read", count, "ms", None, 1000 * seconds / count),
        Figure("NIXL: one small read with so many peers", count, "us", None, once),
        Figure("NIXL: processor share at rest", count, "%", None, max(100 * idle_s, 0.01)),
        Figure("NIXL: metadata of an agent", count, "B", None, float(len(told[0][0]))),
    ]


def _read(agent: Any, landing: Any, name: str | bytes, address: int) -> None:
    peer = name.decode() if isinstance(name, bytes) else name
    here = agent.get_xfer_descs(np.array([(landing.ctypes.data, 8, 0)], "u8"), "DRAM")
    there = agent.get_xfer_descs(np.array([(address, 8, 0)], "u8"), "DRAM")
    handle = agent.initialize_xfer("READ", here, there, peer, b"")
    state = agent.transfer(handle)
    while state == "PROC":
        time.sleep(0.0001)
        state = agent.check_xfer_state(handle)
    assert state == "DONE", state
    handle.release()


def _registrations() -> list[Figure]:
    """Regions of one agent: why a pool is one region."""
    from cluster.kv.wires.nixl_agent import make_agent

    figures = []
    for count in (2, 100, 1_000):
        agent = make_agent(f"regions-{count}")
        memory = np.zeros((count, 1 << 14), "u1")
        began = time.perf_counter()
        for row in memory:
            agent.register_memory([(row.ctypes.data, row.nbytes, 0, "")], "DRAM")
        each_us = 1e6 * (time.perf_counter() - began) / count
        size = float(len(agent.get_agent_metadata()))
        figures.append(Figure("NIXL: one registration", count, "us", None, each_us))
        figures.append(Figure("NIXL: metadata with so many regions", count, "B", None, size))
        del agent
    return sorted(figures, key=lambda figure: figure.what)


def _looks() -> list[Figure]:
    """One step of the importer's thread, which comes every 0.5 ms while something is read."""
    from cluster.kv.held_handles import HeldHandles
    from cluster.kv.peers import Peers
    from cluster.kv.transfer_config import TransferConfig
    from cluster.messages import CrossKVHandle

    class NoWire:
        def connect(self, agent: str, metadata: bytes) -> None: ...

    figures = []
    for known in KNOWN:
        held = HeldHandles(time.monotonic)
        wire: Any = NoWire()
        peers = Peers(wire, held, TransferConfig(b"key", "decoder", renew_s=1e9))
        for number in range(known):
            peers.add(f"encoder-{number}", b"")
        for number in range(HELD):
            agent = f"encoder-{number % known}"
            held.hold(
                CrossKVHandle("r", number, 1, agent, b"", "", (), 0, 0, 0, 0, f"{number}", 1.0)
            )
        ceiling = cpu_us(time.monotonic)
        ours = cpu_us(partial(peers.renew, time.monotonic()))
        figures.append(
            Figure(f"a step's look at known peers, {HELD} held", known, "us", ceiling, ours)
        )
    return figures

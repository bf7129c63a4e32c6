"""The hand-off of one window on one host, beside its ceiling and Ray's object store.

    python -m benchmark.transfer.kv_transfer [--device cuda]

In every round these run in random order: ours (accept, READ, generation, release; the encoder is in
another process), the ceilings (raw `process_vm_readv` of the same pages, and memcpy), and Ray's
object store. KV lies in pages of 1500 frames, as served on a CPU, and with `--device cuda` in pages
of 125 frames on one GPU for both processes, where the ceiling is a copy. Prints a table, and one
JSON line last.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import torch

from benchmark.shared.command import make_parser, print_result, print_table
from benchmark.shared.machine import median_ratio
from cluster.common.kv.connect import GPU_PAGE_FRAMES, make_wire
from cluster.common.kv.exporter import KVExporter
from cluster.common.kv.importer import KVImporter
from cluster.common.kv.layout import PageLayout, window_bytes
from cluster.common.kv.wire import TransferConfig
from cluster.common.messages import CrossKVHandle

# A round is never cut short by the expiry of a lease.
CONFIG = TransferConfig(b"benchmark", "benchmark", "nixl", lease_s=600.0)
# name, decoder layers, heads of 64; bf16, 1500 frames
SHAPES = [
    ("tiny", 4, 6),
    ("large-v3-turbo", 4, 20),
    ("small", 12, 12),
    ("large-v3", 32, 20),
]
ROUNDS = 25
PROGRAM = "benchmark.transfer.kv_transfer"


class Encoder:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, "--encoder", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            cwd=Path(__file__).parents[2],
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, *request: Any) -> Any:
        self._connection.send(request)
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.wait(60)


def serve_encoder(connection: Connection) -> None:
    torch.set_num_threads(1)
    exporter: Any = None
    while True:
        try:
            name, *args = connection.recv()
        except EOFError:
            return
        if name == "open":
            if exporter is not None:
                exporter.close()
            layout, device = args
            config = replace(CONFIG, device=device)
            exporter = KVExporter(layout, layout.pages_per_window, config, make_wire(config))
            exporter.pool.tensor.copy_(make_kv(layout))
            connection.send(None)
        else:
            pages = exporter.reserve(layout.pages_per_window, timeout_s=60.0)
            connection.send(
                exporter.publish(pages, request_id="b", window=0, attempt=0, frames=1500)
            )


def make_kv(layout: PageLayout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layout.page_frames)
    shape = (layout.pages_per_window, *layout.page_shape)
    return torch.rand(shape, generator=generator).to(torch.bfloat16)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def process_vm_readv(pid: int, local: int, remote: int, n_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    done = 0
    while done < n_bytes:
        here = _IoVec(local + done, n_bytes - done)
        there = _IoVec(remote + done, n_bytes - done)
        n = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if n <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += n


def start_ray() -> Any:
    """Start Ray, and an actor that returns KV of the size that it was given last."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)

    class RayEncoder:
        def prepare(self, n_bytes: int) -> None:
            self.kv = np.ones(n_bytes, dtype=np.uint8)

        def hand_off(self) -> Any:
            return self.kv

    remote: Any = ray.remote(num_cpus=1)
    return remote(RayEncoder).remote()


def measure(
    layout: PageLayout, encoder: Encoder, device: str, ray_encoder: Any = None
) -> dict[str, Any]:
    """`ray_encoder` comes from `start_ray`; None on a GPU."""
    n_bytes = window_bytes(layout)
    encoder.call("open", layout, device)
    config = replace(CONFIG, device=device)
    importer = KVImporter(layout, layout.pages_per_window, config, make_wire(config))
    pages = importer.pool.allocate(layout.pages_per_window) or ()
    target = importer.pool.base_address
    source = np.ones(n_bytes, dtype=np.uint8)

    def ours(handle: CrossKVHandle) -> None:
        importer.accept(handle)
        importer.fetch(handle, pages).result()

    def by_ray(_: CrossKVHandle) -> None:
        import ray

        kv = ray.get(ray_encoder.hand_off.remote())
        ctypes.memmove(target, kv.ctypes.data, n_bytes)

    def on_gpu(_: CrossKVHandle) -> None:
        importer.pool.tensor.copy_(on_device)
        torch.cuda.synchronize()

    ours(encoder.call("publish"))  # connects, and touches every page
    if not torch.equal(importer.pool.tensor.cpu(), make_kv(layout)):
        raise RuntimeError("the hand-off changed the KV")
    contenders: dict[str, Callable[[CrossKVHandle], object]] = {"ours": ours}
    if device == "cpu":
        import ray

        ray.get(ray_encoder.prepare.remote(n_bytes))
        contenders |= {
            "process_vm_readv": lambda handle: process_vm_readv(
                encoder.pid, target, handle.addresses[0], n_bytes
            ),
            "memcpy": lambda _: ctypes.memmove(target, source.ctypes.data, n_bytes),
            "ray": by_ray,
        }
        ceiling = "process_vm_readv"
    else:
        on_device = torch.zeros_like(importer.pool.tensor)
        contenders["copy"] = on_gpu
        ceiling = "copy"
    times_ms: dict[str, list[float]] = {contender: [] for contender in contenders}
    for n in range(ROUNDS + 1):
        handle = encoder.call("publish")
        for contender in random.sample(list(contenders), len(contenders)):
            begin = time.perf_counter()
            contenders[contender](handle)
            if n > 0:  # the first round warms up
                times_ms[contender].append((time.perf_counter() - begin) * 1e3)
    transport = importer.transport
    importer.close()
    share = median_ratio(times_ms[ceiling], times_ms["ours"])
    return {
        "shape": layout.model,
        "mb": round(n_bytes / 1e6, 2),
        "transport": transport,
        "median_ms": {name: round(statistics.median(ms), 3) for name, ms in times_ms.items()},
        "of_ceiling": ceiling,
        "speed": round(share, 3),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--encoder", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of both roles")
    args = parser.parse_args()
    if args.encoder is not None:
        serve_encoder(Connection(args.encoder))
        return
    torch.set_num_threads(1)
    encoder, rows = Encoder(), []
    ray_encoder = start_ray() if args.device == "cpu" else None
    frames = 1500 if args.device == "cpu" else GPU_PAGE_FRAMES
    for name, n_layer, n_head in SHAPES:
        layout = PageLayout(name, n_layer, n_head, 64, frames, 1500, "bfloat16")
        rows.append(measure(layout, encoder, args.device, ray_encoder))
        print(f"measured {name}", file=sys.stderr)
    encoder.close()
    print_table(rows, "one window handed off; the speed is ours as a share of the ceiling's")
    about = {"device": args.device, "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    print_result("kv_transfer", {**about, "rows": rows})


if __name__ == "__main__":
    main()

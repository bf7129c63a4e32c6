"""Overwrites a tensor's bytes in a worker's memory, so that it fails what it does and lives on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import torch

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.weights import load_tensors
from cluster.common.settings import BUNDLED_MODEL

PART_BYTES = 2**26  # that are searched at once


def overwrite_norm(process: psutil.Process, role: str) -> int:
    """Make a worker's last layer norm of the bundled model NaN, in float32; the copies of it."""
    checkpoint = open_checkpoint(BUNDLED_MODEL)
    name = f"{role}.layer_norm.weight"
    weight = load_tensors(checkpoint, {name: checkpoint.tensors[name].shape})[name]
    nan = torch.full_like(weight, torch.nan)
    return _overwrite(process.pid, weight.numpy().tobytes(), nan.numpy().tobytes())


def why_not(process: psutil.Process) -> str:
    try:
        os.close(os.open(f"/proc/{process.pid}/mem", os.O_RDWR))
    except OSError as error:
        return f"the memory of process {process.pid} is not ours to write to: {error}"
    return ""


def _overwrite(pid: int, old: bytes, new: bytes) -> int:
    """Write `new` over each `old` in what is the process's own and writable; returns how many."""
    count, pattern = 0, re.compile(re.escape(old))
    memory = os.open(f"/proc/{pid}/mem", os.O_RDWR)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, modes, *_ = line.split()
            begin, end = (int(address, 16) for address in span.split("-"))
            for start in range(begin, end, PART_BYTES) if modes == "rw-p" else ():
                try:
                    part = os.pread(memory, min(PART_BYTES + len(old), end - start), start)
                except OSError:  # given back since the map was read
                    break
                for found in pattern.finditer(part):
                    os.pwrite(memory, new, start + found.start())
                    count += 1
    finally:
        os.close(memory)
    return count

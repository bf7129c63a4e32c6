"""Resolve "auto" to a device and a dtype of this machine. Each role does so once, at start."""

from __future__ import annotations

import os

import torch

from cluster.errors import ConfigurationError
from cluster.settings import Device, DType


def resolve_device(device: Device) -> str:
    """ "cpu" or "cuda"; "auto" takes the GPU where there is one.

    Raises:
        ConfigurationError: CUDA was asked for and this process sees none.
    """
    found = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if found else "cpu"
    if device == "cuda" and not found:
        raise ConfigurationError(
            "device is 'cuda', but torch sees no CUDA device: check the driver, the torch build "
            "and CUDA_VISIBLE_DEVICES, or set device to 'cpu'"
        )
    return device


def resolve_dtype(dtype: DType, device: str) -> str:
    """ "auto" is bfloat16 on a GPU and float32 on a CPU, where results are exact."""
    if dtype != "auto":
        return dtype
    return "float32" if device == "cpu" else "bfloat16"


def use_threads(threads: int) -> None:
    """Set torch's threads of this process; 0 takes every core that the process may use."""
    torch.set_num_threads(threads or _cores())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

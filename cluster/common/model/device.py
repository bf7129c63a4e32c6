"""Resolve "auto" to a device and a dtype of this machine, once, at each role's start."""

from __future__ import annotations

import torch

from cluster.common.cores import usable_cores
from cluster.common.errors import ConfigurationError
from cluster.common.settings import Device, EncoderDType

LEAST_BFLOAT16 = (8, 0)  # compute capability of a GPU that multiplies it: Ampere and later
MOST_STEP = 8  # threads that read as fast as the memory gives


def resolve_device(device: Device) -> str:
    """ "auto" takes the GPU where there is one. Raises ConfigurationError."""
    found = torch.cuda.is_available()
    if device == "auto":
        return "cuda" if found else "cpu"
    if device == "cuda" and not found:
        raise ConfigurationError(
            "device is 'cuda', but torch sees no CUDA device: check the driver, the torch build "
            "and CUDA_VISIBLE_DEVICES, or set device to 'cpu'"
        )
    return device


def resolve_dtype(dtype: EncoderDType, device: str) -> str:
    """What a role computes in: a key of `cluster.common.model.weights.TORCH_DTYPES`.

    "auto" is bfloat16 where that is multiplied natively; elsewhere float16 on a GPU (T4, V100), and
    float32 on a CPU.
    "int8" and "float8" hold weights in 8 bits and compute between them as "auto" does.

    Raises ConfigurationError where int8 was asked for on a GPU, or float8 on a CPU.
    """
    if dtype == "int8" and device != "cpu":
        raise ConfigurationError("dtype int8 is for CPUs: on a GPU take bfloat16 or float8")
    if dtype == "float8" and device == "cpu":
        raise ConfigurationError("dtype float8 is for GPUs: on a CPU take int8 or bfloat16")
    if dtype not in ("auto", "int8", "float8"):
        return dtype
    if device == "cpu":
        return "bfloat16" if has_native_bfloat16() else "float32"
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < LEAST_BFLOAT16
    return "float16" if old else "bfloat16"


def has_native_bfloat16() -> bool:
    """By AVX512_BF16 or AMX; other CPUs convert, slower than float32."""
    checks = (
        getattr(torch.cpu, name, None)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and any(check and check() for check in checks)


def use_threads(threads: int) -> None:
    """Set torch's threads of this process; 0 takes every core that the process may use."""
    torch.set_num_threads(threads or usable_cores())


def use_step_threads(threads: int) -> None:
    """The same for a decoder's products by torch; 0 takes half of the cores.

    Those of few rows are short: waking threads for each costs more than these save.
    """
    use_threads(threads or max(1, usable_cores() // 2))


def step_threads(threads: int) -> int:
    """Threads of a compiled decode step; 0 takes every core, up to `MOST_STEP`."""
    return threads or min(usable_cores(), MOST_STEP)

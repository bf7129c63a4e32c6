"""Choose the device, the dtype and the number of threads of a role when it starts."""

from __future__ import annotations

import torch

from cluster.common.cores import usable_cores
from cluster.common.errors import ConfigurationError
from cluster.common.settings import Device, DType

LEAST_BFLOAT16 = (8, 0)  # compute capability of the first GPUs that multiply it, Ampere
MOST_STEP = 8  # so many threads reach the memory's full bandwidth


def resolve_device(device: Device) -> str:
    """Raises ConfigurationError for "cuda" without a GPU."""
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
    """Return the dtype that a role computes in, a key of `weights.TORCH_DTYPES`.

    For "auto" and "int8" it is bfloat16 where the hardware multiplies that, otherwise float16 on a
    GPU and float32 on a CPU. Raises ConfigurationError for "int8" on a GPU.
    """
    if dtype == "int8" and device != "cpu":
        raise ConfigurationError("dtype int8 is for CPUs: on a GPU take bfloat16")
    if dtype not in ("auto", "int8"):
        return dtype
    if device == "cpu":
        return "bfloat16" if has_native_bfloat16() else "float32"
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < LEAST_BFLOAT16
    return "float16" if old else "bfloat16"


def has_native_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16; others convert it, which is slower than float32."""
    checks = (
        getattr(torch.cpu, name, None)
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_onednn and any(check and check() for check in checks)


def use_threads(threads: int) -> None:
    torch.set_num_threads(threads or usable_cores())


def use_step_threads(threads: int) -> None:
    """Set torch's threads for a decoder; 0 takes half of the cores, since the products of a step
    are too short for more.
    """
    use_threads(threads or max(1, usable_cores() // 2))


def step_threads(threads: int) -> int:
    return threads or min(usable_cores(), MOST_STEP)

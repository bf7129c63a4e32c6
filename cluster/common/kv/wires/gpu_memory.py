"""What a GPU's memory must be like for a page pool, and how many windows it has room for.

Sizes are worked out before anything is allocated, from the shapes of weights and batches, so that
what cannot fit is refused at start, with the figures. On a CPU memory is committed on first touch,
and a pool is as large as the settings say.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cluster.common.errors import ConfigurationError

CPU_WINDOWS = 16  # where the settings leave it open
RESERVE_BYTES = 2 << 30  # for CUDA's context, libraries' workspaces and fragmentation

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_UNREADABLE = {  # modes whose memory has no address that another process could be given
    re.compile(r"expandable_segments\s*:\s*(true|1)", re.I): "expandable_segments:True",
    re.compile(r"backend\s*:\s*cudaMallocAsync", re.I): "backend:cudaMallocAsync",
}


def check_allocator(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse allocators whose memory cannot be registered once and read by others for good.

    Raises:
        ConfigurationError: says which variable to change.
    """
    for variable in _VARIABLES:
        for pattern, mode in _UNREADABLE.items():
            if pattern.search(environ.get(variable, "")):
                raise ConfigurationError(
                    f"{variable} asks for {mode}, whose memory moves or cannot be mapped by other "
                    f"processes: KV pools on a GPU are registered once, so take it out"
                )


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """What one worker may still take of its GPU."""

    name: str
    free_bytes: int

    def less(self, n_bytes: int) -> GpuBudget:
        """What is left when so much is taken."""
        return GpuBudget(self.name, max(0, self.free_bytes - n_bytes))


def gpu_budget(device: str, share: float = 1.0) -> GpuBudget | None:
    """What is left of the current CUDA device, of which `share` is ours; None on a CPU."""
    if device == "cpu":
        return None
    free, total = torch.cuda.mem_get_info()
    left = int(share * total) - torch.cuda.memory_reserved()
    return GpuBudget(torch.cuda.get_device_name(), max(0, min(free, left)))


def pool_windows(
    field: str,
    asked: int,
    most: int,
    window_bytes: int,
    budget: GpuBudget | None,
    needs: Mapping[str, int],
    portion: float = 1.0,
) -> int:
    """How many windows a pool holds.

    Args:
        field: the setting's name, for messages.
        asked: the setting's value; 0 leaves the number open.
        most: how many are of use, where the number is open.
        window_bytes: of one window, in this pool or in all pools that hold equally many.
        needs: bytes that the worker's other parts will take, by the name of the part.
        portion: of the room left, for this pool, where the number is open and other pools follow.

    Raises:
        ConfigurationError: so many do not fit; with the figures.
    """
    if budget is None:
        return asked or CPU_WINDOWS
    needs = {**needs, "reserve": RESERVE_BYTES}
    room = budget.free_bytes - sum(needs.values())
    fits = max(0, room // window_bytes)
    if asked > fits or fits < 1:
        parts = ", ".join(f"{_gb(size)} for {what}" for what, size in needs.items())
        raise ConfigurationError(
            f"{field}: {asked or 1} windows of {_gb(window_bytes)} do not fit: {budget.name} has "
            f"{_gb(budget.free_bytes)} for this worker, less {parts}, which leaves room for {fits}"
        )
    return asked or max(1, min(most, int(portion * room) // window_bytes))


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"

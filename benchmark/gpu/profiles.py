"""Where the time of something on the device goes, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmark.gpu.rig import Rig

TOP_KERNELS = 12


def profiled(rig: Rig, run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The kernels that took longest while `run` ran, on whichever thread: calls, ms, share."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = rig.device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        run()
    time_of = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, time_of))
    total = sum(getattr(row, time_of) for row in rows) or 1.0
    return [
        {
            "kernel": row.key[:80],
            "calls": row.count,
            "ms": round(getattr(row, time_of) / 1000, 3),
            "share": round(getattr(row, time_of) / total, 3),
        }
        for row in rows[:TOP_KERNELS]
    ]

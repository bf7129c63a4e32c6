"""How many cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

# A window of 24 s takes 46 ms of an audio worker and 10 ms of its router.
LEAST_AUDIO_WORKERS, MOST_AUDIO_WORKERS = 2, 8


def audio_workers_of(setting: int, cores: int = 0) -> int:
    """Audio workers of a router: the setting or, where it is 0, half of the cores, 2 to 8."""
    # `cores` is given for another machine than this one.
    usual = (cores or usable_cores()) // 2
    return setting or min(MOST_AUDIO_WORKERS, max(LEAST_AUDIO_WORKERS, usual))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores by the process's affinity, and its container's limit on processor time."""
    has_affinity = hasattr(os, "sched_getaffinity")
    n = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = _quota(cgroup)
    return n if quota is None else max(1, min(n, math.ceil(quota)))


def _quota(cgroup: Path) -> float | None:
    """Limit in cores of Linux's control groups (version 2 or 1); None: no limit."""
    try:
        if (unified := cgroup / "cpu.max").exists():
            limit, period = unified.read_text().split()
        else:
            limit = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max"
        return None

"""Cores that a process may use, and who goes first on them.

A container limited to two must not start 64 threads.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.common import cores
from cluster.common.model import device


@pytest.fixture(autouse=True)
def sixty_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)


@pytest.mark.parametrize(
    ("files", "n"),
    [
        ({}, 64),
        ({"cpu.max": "max 100000\n"}, 64),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_container_s_limit_counts(tmp_path: Path, files: dict[str, str], n: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cores.usable_cores(tmp_path) == n


def test_audio_is_decoded_by_half_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for n_cores, n_workers in ((1, 2), (8, 4), (16, 8), (128, 8)):
        monkeypatch.setattr(cores, "usable_cores", lambda n=n_cores: n)
        assert cores.audio_workers_of(0) == n_workers
    assert cores.audio_workers_of(32) == 32
    assert cores.audio_workers_of(0, 8) == 4


@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_a_gpu_that_has_no_bfloat16_computes_in_float16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    assert device.resolve_dtype("auto", "cuda") == dtype
    assert device.resolve_dtype("bfloat16", "cuda") == "bfloat16"

"""Which allocators a GPU pool accepts, and how many windows fit; worked out without a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import pytest

from cluster.common.errors import ConfigurationError
from cluster.common.kv.nixl_wire import check_allocator, warn_if_slow
from cluster.common.kv.pool import CPU_WINDOWS, GpuBudget, gpu_budget
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.dims import ModelDims
from cluster.common.settings import DecoderSettings, EncoderSettings, Settings
from cluster.serve.in_process import sized_together
from decoder_worker import build as decoder_build
from encoder_worker import sizing as encoder_sizing

LARGE_V3 = ModelDims(128, 51_866, 1500, 1280, 20, 32, 5120, 448, 1280, 20, 32, 5120)
H200 = GpuBudget("NVIDIA H200", 140_000_000_000)
SMALL = GpuBudget("8 GB", 8_000_000_000)


class Large:
    dims = LARGE_V3
    fingerprint = "large-v3"


CHECKPOINT = cast(Checkpoint, Large())


def exported(budget: GpuBudget | None, portion: float = 1.0, **encoder: Any) -> int:
    settings = Settings(encoder=EncoderSettings(**encoder))
    device = "cpu" if budget is None else "cuda"
    sized = encoder_sizing.sized(settings, CHECKPOINT, device, budget, portion)
    return sized.encoder.export_windows


def held(budget: GpuBudget | None, **decoder: Any) -> int:
    settings = Settings(decoder=DecoderSettings(**decoder))
    device = "cpu" if budget is None else "cuda"
    return decoder_build.sized(settings, CHECKPOINT, device, budget).decoder.kv_windows


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_moves_is_refused(variable: str) -> None:
    check_allocator({})
    check_allocator({variable: "expandable_segments:False,backend:native"})
    for value in (
        "expandable_segments:True",
        "max_split_size_mb:64,expandable_segments: true",
        "backend:cudaMallocAsync",
    ):
        with pytest.raises(ConfigurationError, match=rf"{variable}.*take it out"):
            check_allocator({variable: value})


def test_a_cpu_s_pools_are_as_large_as_the_settings_say() -> None:
    assert gpu_budget("cpu") is None
    assert exported(None) == held(None) == CPU_WINDOWS
    assert exported(None, export_windows=10_000) == held(None, kv_windows=10_000) == 10_000


def test_on_a_gpu_pools_follow_the_batch_and_what_is_free() -> None:
    assert exported(H200, max_batch=16) == 64
    # 8.0 GB less 1.7 of weights, 1.7 of batches and 2.1 of reserve leave 2.5: ten windows.
    few = exported(SMALL)
    assert 8 <= few <= 12
    assert exported(SMALL, 0.5) == few // 2
    assert 400 < held(H200, max_batch=256) < 512  # all that fits, fewer than two batches
    assert held(H200, max_batch=16) == 32


@pytest.mark.parametrize(
    ("budget", "fewest", "most"),
    [(H200, 64, 64), (GpuBudget("24 GB", 24 * 10**9), 48, 64), (SMALL, 8, 12)],
)
def test_on_a_gpu_the_batch_is_as_large_as_its_memory_allows(
    budget: GpuBudget, fewest: int, most: int
) -> None:
    """Each of its rows has self-attention KV of 73 MB, and a window of 246 MB at least."""
    sized = decoder_build.sized(Settings(), CHECKPOINT, "cuda", budget).decoder
    assert fewest <= sized.max_batch <= most
    assert sized.kv_windows >= sized.max_batch
    few = Settings(decoder=DecoderSettings(kv_windows=10))
    assert decoder_build.sized(few, CHECKPOINT, "cuda", budget).decoder.kv_windows == 10
    assert decoder_build.sized(Settings(), CHECKPOINT, "cpu", None).decoder.max_batch == 16


def test_pools_are_sized_for_what_travels() -> None:
    """States take a sixtieth of the KV's room; a decoder that projects has less for its pool."""
    states = Settings(handoff="encoder_states", encoder=EncoderSettings(max_batch=16))
    assert encoder_sizing.sized(states, CHECKPOINT, "cuda", SMALL).encoder.export_windows == 64
    lands = Settings(handoff="encoder_states", decoder=DecoderSettings(max_batch=256))
    held_so = decoder_build.sized(lands, CHECKPOINT, "cuda", H200).decoder.kv_windows
    # 210 MB of weights, 983 of their results and 123 of landing pool, of windows of 246 MB.
    assert 5 <= held(H200, max_batch=256) - held_so <= 6


def test_one_process_shares_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """The export pool takes a quarter of the room; the decoder's what is left by all of it."""
    monkeypatch.setattr(
        "cluster.serve.in_process.gpu_budget", lambda device: GpuBudget("16 GB", 16 * 10**9)
    )
    sized = sized_together(Settings(decoder=DecoderSettings(max_batch=64)), CHECKPOINT, "cuda")
    taken = encoder_sizing.taken_bytes(sized, CHECKPOINT, "cuda")
    left = GpuBudget("left", 16 * 10**9 - taken)
    assert 8 <= sized.encoder.export_windows <= 12
    assert sized.decoder.kv_windows == held(left, max_batch=64)
    assert sized.decoder.kv_windows > 1


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    for budget, asked in ((H200, 10_000), (GpuBudget("tiny", 10**9), 0)):
        with pytest.raises(ConfigurationError) as refused:
            held(budget, kv_windows=asked)
        for part in ("decoder.kv_windows", "0.25 GB", "for weights", "room for", budget.name):
            assert part in refused.value.message


def test_the_largest_models_weigh_what_is_published() -> None:
    """1.55 billion parameters, in both roles together; 2 bytes each."""
    total = encoder_sizing.weight_bytes(LARGE_V3, "bfloat16")
    total += decoder_build.weight_bytes(LARGE_V3, "bfloat16")
    assert total == pytest.approx(2 * 1.5435e9, rel=0.005)


def test_a_gpu_s_kv_over_sockets_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_if_slow("cuda_ipc")
    warn_if_slow("rc_mlx5")
    assert not caplog.records
    warn_if_slow("tcp")
    assert "neither NVLink" in caplog.text
    assert "encoder_states" in caplog.text


CHECK = """
import logging, logging.handlers, sys
from cluster.common.kv.nixl_wire import load_api
to = logging.StreamHandler(sys.stdout)
buffered = logging.handlers.MemoryHandler(capacity=1, target=to)  # as Ray Serve's log file
logging.getLogger("somebody").addHandler(buffered)
load_api()
assert buffered.target is to
logging.getLogger("somebody").warning("still here")
"""


def test_handlers_of_others_stay_open() -> None:
    """In a process of its own: here NIXL may have been imported before."""
    pytest.importorskip("nixl_cu13", reason="NIXL has wheels for Linux only")
    run = subprocess.run([sys.executable, "-c", CHECK], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "still here" in run.stdout

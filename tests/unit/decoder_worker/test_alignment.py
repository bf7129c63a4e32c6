"""The aligner's parts against plain versions of them, and its independence of batch and pages."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from whisper import timing

from cluster.common.errors import CheckpointError, SequenceFailedError
from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.kv_scales import kv_scales
from decoder_worker.alignment import alignment_heads, median_filter, standardise
from decoder_worker.cpu.warping import first_columns
from tests.support.checkpoints import cached_checkpoint, make_checkpoint
from tests.support.workers.model_runners import AlignerBench


def openai_first_columns(x: NDArray[np.float32]) -> list[int]:
    """By openai/whisper's functions, uncompiled."""
    rows, columns = timing.dtw_cpu.py_func(x.astype(np.float64))
    jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
    return columns[jumps].tolist()


@settings(deadline=None, max_examples=60)
@given(
    hnp.arrays(
        np.int8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.integers(-2, 2)
    )
)
def test_among_equal_paths_it_is_the_references(steps: NDArray[np.int8]) -> None:
    x = steps.astype(np.float32) / 4
    assert first_columns(x).tolist() == openai_first_columns(x)


def test_python_s_lock_is_free_while_a_path_is_found() -> None:
    x, begun, seen = np.zeros((60, 20_000), np.float32), threading.Event(), threading.Event()
    first_columns(x)  # compiles it

    def find() -> None:
        begun.set()
        n_left = 1000
        while n_left and not seen.is_set():
            first_columns(x)
            n_left -= 1
        found.append(n_left)

    found: list[int] = []
    finder, usual_s = threading.Thread(target=find), sys.getswitchinterval()
    sys.setswitchinterval(600.0)  # nobody is made to give it away
    try:
        finder.start()
        begun.wait()
        seen.set()
    finally:
        sys.setswitchinterval(usual_s)
        finder.join()
    assert found[0] > 0


@pytest.mark.parametrize("n_frames", [1, 3, 4, 7, 50])
def test_the_median_filter_is_the_references(n_frames: int) -> None:
    x = torch.randn(3, 5, n_frames, generator=torch.Generator().manual_seed(n_frames))
    assert torch.equal(median_filter(x), timing.median_filter(x, 7))


def test_a_frame_at_which_all_tokens_look_alike_counts_nothing() -> None:
    weights = torch.tensor([[[0.5, 0.5], [0.5, 0.1]]])
    torch.testing.assert_close(standardise(weights), torch.tensor([[[0.0, 1.0], [0.0, -1.0]]]))


def test_heads_are_the_checkpoints_or_all_of_the_upper_half(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, decoder_layers=3)
    file = folder / "generation_config.json"
    config = json.loads(file.read_text())

    def heads(listed: list[list[int]] | None) -> dict[int, list[int]]:
        file.write_text(json.dumps(config | {"alignment_heads": listed}))
        return alignment_heads(open_checkpoint(str(folder)))

    assert heads([[2, 1], [0, 1], [2, 0]]) == {0: [1], 2: [0, 1]}
    assert heads(None) == heads([]) == {1: [0, 1], 2: [0, 1]}
    for wrong in ([[3, 0]], [[0, 2]], [[-1, 0]]):
        with pytest.raises(CheckpointError, match="alignment head"):
            heads(wrong)


def test_a_text_is_aligned_in_a_batch_as_it_is_alone() -> None:
    bench = AlignerBench(cached_checkpoint("tiny"))
    items = [bench.item(0, 40), bench.item(1, 3, 500), bench.item(2, 224), bench.item(3, 0, 7)]
    together = bench.align(items)
    for item, alignment in zip(items, together, strict=True):
        (alone,) = bench.align([item])
        assert alignment.tokens == alone.tokens == item.tokens
        assert alignment.times_s == alone.times_s
        assert alignment.probs == pytest.approx(alone.probs, rel=1e-4)


def test_small_pages_give_what_whole_ones_give() -> None:
    folder = cached_checkpoint("micro")
    whole, small = AlignerBench(folder), AlignerBench(folder, page_frames=60, page_tokens=16)
    spans = [(0, 30, 3000), (1, 12, 1000), (2, 5, 119)]
    expected = whole.align([whole.item(*span) for span in spans])
    found = small.align([small.item(*span) for span in spans])
    for one, other in zip(found, expected, strict=True):
        assert one.times_s == other.times_s
        assert one.probs == pytest.approx(other.probs, rel=1e-4)


@pytest.mark.parametrize("page_frames", [0, 60])
def test_8_bit_pages_are_aligned_as_the_numbers_they_hold(page_frames: int) -> None:
    folder = cached_checkpoint("micro")
    eighth = AlignerBench(folder, page_frames=page_frames, kv_dtype="float8_e4m3fn")
    wide = AlignerBench(folder, page_frames=page_frames)
    stored = eighth.cross_pool.tensor.float()
    scales = kv_scales(open_checkpoint(str(folder)), torch.float8_e4m3fn)
    assert scales is not None
    factors = torch.stack((scales.keys, scales.values[:, None].expand_as(scales.keys)), 1)
    wide.cross_pool.tensor.copy_(stored * factors[:, :, None, :, None])
    found, expected = (bench.align([bench.item(0, 30)])[0] for bench in (eighth, wide))
    assert found.times_s == expected.times_s
    assert found.probs == pytest.approx(expected.probs, rel=1e-4)


@pytest.mark.parametrize("content_frames", [1, 2, 6, 7, 9, 331, 3000])
def test_times_never_fall_and_stay_inside_the_audio(content_frames: int) -> None:
    bench = AlignerBench(cached_checkpoint("micro"))
    (alignment,) = bench.align([bench.item(0, 20, content_frames)])
    assert len(alignment.times_s) == 21
    assert list(alignment.times_s) == sorted(alignment.times_s)
    assert alignment.times_s[0] == 0.0
    assert alignment.times_s[-1] <= content_frames / 100
    assert all(0 <= prob <= 1 for prob in alignment.probs)


def test_a_broken_window_fails_and_the_others_can_be_aligned_without_it() -> None:
    bench = AlignerBench(cached_checkpoint("micro"))
    items = [bench.item(window, 10) for window in range(3)]
    expected = bench.align(items)
    bench.cross_pool.tensor[list(bench.cross_pages[1])] = torch.nan
    with pytest.raises(SequenceFailedError, match="could not be aligned"):
        bench.align(items)
    with pytest.raises(SequenceFailedError):
        bench.align(items[1:2])
    again = [bench.align([items[window]])[0] for window in (0, 2)]
    assert [a.times_s for a in again] == [expected[0].times_s, expected[2].times_s]

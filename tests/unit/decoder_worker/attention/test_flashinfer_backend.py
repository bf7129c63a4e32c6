"""What the flashinfer backend plans, and when: its kernels stand in by `fake_flashinfer`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

from cluster.common.errors import ConfigurationError
from cluster.common.model.layers import as_it_is
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.backends import Attentions, choose_attention
from decoder_worker.gpu.decoder import GpuDecoder
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.sampling.slots import SlotTable
from tests.support.checkpoints import cached_checkpoint
from tests.support.gpu import fake_flashinfer as fake
from tests.support.workers.decoder_engines import assert_same, make_stand

N_HEAD, HEAD_DIM, N_LAYER = 2, 8, 2
FRAMES = 60
N_PINNED = 8  # of `flashinfer_tables`, which imports flashinfer


@pytest.fixture
def backend() -> Iterator[ModuleType]:
    with fake.fake_flashinfer() as module:
        yield module


def make_pools(page_tokens: int, page_frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (N_LAYER, 2)
    own = torch.full((24, *shape, page_tokens, N_HEAD, HEAD_DIM), torch.nan)
    return own, torch.randn(24, *shape, page_frames, N_HEAD, HEAD_DIM)


def test_steps_plan_only_what_changed(backend: ModuleType) -> None:
    steps = backend.FlashInfer(*make_pools(4, 20)).fixed(4, 1)
    self_wrapper, cross_wrapper = fake.BatchDecodeWithPagedKVCacheWrapper.made
    inert = ([23], [0], 0)
    rows = [([0, 1, 2, 3], [0, 1, 2], 0), ([4, 5, 6, 7], [5, 4, 3], 0), inert, inert]
    plans = []
    for step in range(12):
        if step == 5:
            rows[2] = ([8, 9, 10], [6, 7, 8], 0)
        if step == 9:
            rows[0] = inert
        lengths = [1 if row is inert else row[2] + 1 for row in rows]
        frames = [1 if row is inert else FRAMES for row in rows]
        batch = AttentionBatch(
            PagedKV.make([1] * 4, [row[0] for row in rows], lengths, 4),
            PagedKV.make([1] * 4, [row[1] for row in rows], frames, 20),
        )
        steps.plan(batch)
        rows = [row if row is inert else (row[0], row[1], row[2] + 1) for row in rows]
        plans.append((self_wrapper.n_plans, cross_wrapper.n_plans))
    # Pages begin at steps 4 and 8, for the third row at 9, when the first one goes.
    assert [own for own, _ in plans] == [1, 1, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5]
    assert [cross for _, cross in plans] == [1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("part", ["on_device", "fast_decode_plan"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_plan_that_raised_is_made_anew(
    part: str, goes_on: bool, backend: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, cross = make_pools(4, 20)
    own.normal_()
    steps, reference = backend.FlashInfer(own, cross).fixed(2, 1), TorchAttention(own, cross)
    windows = PagedKV.make([1, 1], [[0, 1, 2], [5, 4, 3]], [FRAMES, 43], 20)

    def batch(*lengths: int) -> AttentionBatch:
        return AttentionBatch(PagedKV.make([1, 1], [[0, 1], [2, 3]], lengths, 4), windows)

    def without_room(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError("no room")

    steps.plan(batch(3, 4))
    with monkeypatch.context() as patched:
        for name in ("flashinfer_backend", "flashinfer_tables"):
            module = sys.modules[f"decoder_worker.attention.{name}"]
            patched.setattr(module, part, without_room, raising=False)
        with pytest.raises(torch.OutOfMemoryError):
            steps.plan(batch(4, 5))
    lengths = (4, 5) if goes_on else (4, 4)
    steps.plan(batch(*lengths))
    steps.begin(torch.tensor(lengths) - 1)
    reference.plan(batch(*lengths))
    q, k, v = torch.randn(3, 2, N_HEAD, HEAD_DIM)
    expected = reference.self_attention(0, q, k, v)
    torch.testing.assert_close(steps.self_attention(0, q, k, v), expected)


def test_prompts_are_planned_for_their_length_and_only_for_other_pages(backend: ModuleType) -> None:
    """The fake asserts that every plan names the length."""
    own, cross = make_pools(8, 20)
    prompts = backend.FlashInfer(own, cross).fixed(2, 4)
    wrappers = fake.BatchPrefillWithPagedKVCacheWrapper.made
    plans = []
    for pages, windows in (([0, 1], [0, 1]), ([0, 1], [0, 1]), ([0, 1], [2, 1]), ([3, 1], [2, 1])):
        table = partial(PagedKV.make, [4, 4])
        rows, kv = [[page] for page in pages], [[page] for page in windows]
        prompts.plan(AttentionBatch(table(rows, [4, 4], 8), table(kv, [20, 7], 20)))
        plans.append([wrapper.n_plans for wrapper in wrappers])
    assert plans == [[1, 1], [1, 1], [1, 2], [2, 2]]


def test_all_tables_share_a_few_pinned_buffers(backend: ModuleType) -> None:
    own, cross = make_pools(8, 20)
    kernels = backend.FlashInfer(own, cross)
    prompts = [kernels.fixed(2, 4) for _ in range(20)]
    wrappers = fake.BatchPrefillWithPagedKVCacheWrapper.made
    assert all(wrapper._pin_memory_int_workspace_buffer is None for wrapper in wrappers)
    table = PagedKV.make([4, 4], [[0], [1]], [4, 4], 8)
    for one in prompts:
        one.plan(AttentionBatch(table, table))
    used = [id(wrapper._pin_memory_int_workspace_buffer) for wrapper in wrappers]
    assert len(set(used)) == N_PINNED
    assert all(len(set(used[i : i + N_PINNED])) == N_PINNED for i in range(len(used) - N_PINNED))


def test_rows_that_share_a_window_are_queries_of_one_entry(backend: ModuleType) -> None:
    own, cross = make_pools(4, 20)
    steps = backend.FlashInfer(own, cross).fixed(6, 1, 3)
    (window_wrapper,) = fake.BatchPrefillWithPagedKVCacheWrapper.made
    for step in range(6):
        batch = AttentionBatch(
            PagedKV.make([1] * 6, [[2 * row, 2 * row + 1] for row in range(6)], [step + 1] * 6, 4),
            PagedKV.make([3, 3], [[0, 1, 2], [5, 4, 3]], [FRAMES, 43], 20),
        )
        steps.plan(batch)
    assert window_wrapper.n_plans == 1
    assert window_wrapper.counts == [3, 3]


@contextmanager
def layers_of_a_gpu() -> Iterator[None]:
    """Products as they are loaded, as our kernels' layers need them, and the GPU's sampler."""

    def choose(rules: LogitRules, slots: SlotTable) -> GpuSampler:
        return GpuSampler(TorchSampler(rules, slots), rules, slots)

    with (
        patch("decoder_worker.model.packer", lambda *args, **flags: as_it_is),
        patch("decoder_worker.model_runner.choose_sampler", choose),
    ):
        yield


@pytest.mark.parametrize("fewer", [False, True])
def test_the_engine_gives_the_same_texts(fewer: bool, backend: ModuleType) -> None:
    """fewer: with the GPU's layers and sampler of few kernels, by their plain twins."""

    def choose(own: torch.Tensor, cross: torch.Tensor) -> Attentions:
        kernels = backend.FlashInfer(own, cross)
        ragged = kernels.ragged()
        return Attentions(ragged, kernels.fixed, projected=ragged if fewer else None)

    make = partial(make_stand, cached_checkpoint(), max_batch=8, page_tokens=16, page_frames=100)
    with make() as stand:
        expected = stand.decode_all()
    with (
        layers_of_a_gpu() if fewer else nullcontext(),
        patch.object(GpuDecoder, "states", autospec=True, side_effect=GpuDecoder.states) as states,
        make(ahead=1, attention=choose) as stand,
    ):
        for result, other in zip(stand.decode_all(), expected, strict=True):
            assert_same(result, other)
        stand.assert_all_returned()
        assert states.called == fewer


def test_what_the_kernels_cannot_serve_is_said() -> None:
    own, cross = make_pools(8, 20)
    assert choose_attention("auto", own, cross).fixed is None
    assert isinstance(choose_attention("torch", own, cross).ragged, TorchAttention)
    with pytest.raises(ConfigurationError, match="cpu"):
        choose_attention("flashinfer", own, cross)

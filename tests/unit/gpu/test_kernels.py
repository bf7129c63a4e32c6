"""Each kernel of ours equals its plain twin, at the sizes of every published model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from cluster.common.kernels.gpu.kernels import has_triton, loads_triton
from cluster.common.kernels.gpu.operators import TRITON, add_norm
from cluster.common.model.layers import LayerNorm
from decoder_worker.attention.operators import append_qkv
from decoder_worker.gpu.greedy import empty_parts, sample_greedy
from decoder_worker.sampling.logit_rules import LogitRules
from tests.support.gpu.triton_kernels import ARCHITECTURES, compiled, load_kernel
from tests.support.workers.slot_states import N, filled_slots, make_tokenizer

WIDTHS = (384, 512, 768, 1024, 1280)  # of tiny, base, small, medium and all larger ones
SLOW = pytest.mark.slow
IN_ORDER = [384, *(pytest.param(width, marks=SLOW) for width in WIDTHS[1:-1]), 1280]
FLOATS = (torch.float32, torch.float16)  # NumPy, which interprets, has no bfloat16
SHARES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
UNTOUCHED = -7.0
OURS = "decoder_worker.gpu.kernels"

NORM = "launch_add_norm"


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_norm(width: int, dtype: torch.dtype) -> LayerNorm:
    gain = 1 + 0.1 * rand(width, seed=1)
    return LayerNorm(gain.to(dtype), 0.1 * rand(width, seed=2).to(dtype), dtype)


def assert_near(ours: Tensor, expected: Tensor, share: float) -> None:
    largest = (ours.float() - expected.float()).abs().max().item()
    assert largest <= share * expected.float().abs().max().item(), f"differs by {largest}"


@pytest.mark.parametrize("width", IN_ORDER)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_norm_takes_sum_and_bias_along(
    interpreted: Callable[[str], Callable[..., None]], width: int, dtype: torch.dtype
) -> None:
    norm, x, delta = make_norm(width, dtype), rand(3, width), rand(3, width, seed=5, dtype=dtype)
    bias = rand(width, seed=6, dtype=dtype)
    for added, offset in ((None, None), (delta, None), (delta, bias)):
        plain, ours = x.clone(), x.clone()
        expected, out = torch.empty(2, 3, width, dtype=dtype).unbind()
        add_norm(plain, added, offset, norm, expected)
        interpreted(NORM)(ours, added, offset, norm.weight, norm.bias, out)
        assert_near(ours, plain, 1e-6)
        assert_near(out, expected, SHARES[dtype])


@pytest.mark.parametrize("width", IN_ORDER)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_append_splits_and_finds_its_pages(
    monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype
) -> None:
    """Two entries of 3 and 2 pages of 4; tokens at a page's first and last place, and between."""
    heads, page_size, layer = width // 64, 4, 1
    qkv, bias = rand(5, 3 * width, dtype=dtype), rand(3 * width, seed=1, dtype=dtype)
    numbers = ([0, 0, 0, 1, 1], [7, 8, 9, 0, 5], [0, 3, 5], [6, 2, 9, 1, 4])
    table = [torch.tensor(column, dtype=torch.int32) for column in numbers]
    expected = torch.full((11, 2, 2, page_size, heads, 64), UNTOUCHED, dtype=dtype)
    pool = expected.clone()
    plain_q, q = torch.empty(2, 5, heads, 64, dtype=dtype).unbind()
    append_qkv(qkv, bias, *table, expected, layer, plain_q)
    load_kernel(monkeypatch, OURS, interpreted=True).launch_append(
        qkv, bias, *table, pool, layer, q
    )
    assert torch.equal(pool, expected)
    assert torch.equal(q, plain_q)
    assert (pool == UNTOUCHED).sum() == pool.numel() - 2 * qkv.shape[0] * width


@pytest.mark.parametrize(
    ("seed", "n"), [(0, 6), *(pytest.param(s, N, marks=pytest.mark.slow) for s in (1, 2, 3))]
)
@pytest.mark.filterwarnings("ignore:divide by zero")  # of a span in which nothing is allowed
def test_the_choice_equals_its_twin(monkeypatch: pytest.MonkeyPatch, seed: int, n: int) -> None:
    """Rows in every state of the grammar, one with a NaN and one without a finite logit."""
    module = load_kernel(monkeypatch, OURS, interpreted=True)
    tokenizer = make_tokenizer()
    own, plain = filled_slots(tokenizer, seed), filled_slots(tokenizer, seed)
    rules = LogitRules(tokenizer, 50, "cpu")
    logits = rand(n, tokenizer.n_vocab, seed=seed)
    logits[:, rules.timestamp_begin :] += 2.0 * seed
    logits[3, 77], logits[5] = float("nan"), float("-inf")
    logits[4, :9] = 20.0  # the first of several wins
    index = torch.randperm(N)[:n]
    expected_tokens, tokens = torch.empty(2, n, dtype=torch.int64).unbind()
    expected_logprobs, logprobs = torch.empty(2, n).unbind()
    arguments = (rules.suppressed, rules.begin, *rules.marks, *empty_parts(logits))
    sample_greedy(logits, index, plain.table, *arguments, expected_tokens, expected_logprobs)
    module.launch_greedy(logits, index, own.table, *arguments, tokens, logprobs)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(own.table, plain.table)
    torch.testing.assert_close(logprobs, expected_logprobs, equal_nan=True, atol=2e-5, rtol=1e-4)
    assert logprobs[[3, 5]].isnan().all()
    assert logprobs.isnan().sum() == 2


def on_meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_every_kernel_compiles_for_gpus(
    monkeypatch: pytest.MonkeyPatch, architecture: int, width: int
) -> None:
    """In bfloat16, for one row and for many; with wide accesses, and within shared memory."""
    norm = load_kernel(monkeypatch, TRITON, interpreted=False)
    rows, vector = on_meta(8, width), on_meta(width)
    for delta in (None, rows):
        args = (rows, delta, None if delta is None else vector, vector, vector, rows)
        built = compiled(norm.launch_add_norm, "add_norm", architecture, *args)
        assert "ld.global.v" in built["ptx"]
        assert "st.global.v" in built["ptx"]
    ours = load_kernel(monkeypatch, OURS, interpreted=False)
    table = [on_meta(9, dtype=torch.int32)] * 4
    pool, q = on_meta(90, 32, 2, 64, width // 64, 64), on_meta(8, width // 64, 64)
    args = (on_meta(8, 3 * width), on_meta(3 * width), *table, pool, 5, q)
    built = compiled(ours.launch_append, "append_qkv", architecture, *args)
    assert "st.global.v" in built["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_choice_compiles_for_gpus(monkeypatch: pytest.MonkeyPatch, architecture: int) -> None:
    module = load_kernel(monkeypatch, OURS, interpreted=False)
    logits = on_meta(8, 51_866, dtype=torch.float32)
    index, table = on_meta(8, dtype=torch.int64), on_meta(9, 9, dtype=torch.int64)
    parts, begin = empty_parts(logits), on_meta(2, dtype=torch.int64)
    rules = (on_meta(51_866, dtype=torch.float32), begin, 50_257, 50_364, 50_365, 50)
    reduced = (logits, index, table, *rules, *parts)
    compiled(module.launch_reduce, "reduce_logits", architecture, *reduced)
    chosen = (on_meta(8, dtype=torch.int64), on_meta(8, dtype=torch.float32))
    given = (*parts, index, table, 50_257, 50_365, *chosen)
    compiled(module.launch_sample, "sample_greedy", architecture, *given)


def test_without_a_compiler_or_headers_our_kernels_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on Debian's python3 without python3-dev: Triton's first launch would end the engine."""
    triton = pytest.importorskip("triton")

    class NoHeaders:
        @property
        def utils(self) -> None:
            raise subprocess.CalledProcessError(1, ["gcc"], stderr="fatal error: Python.h")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=NoHeaders()))
    loads_triton.cache_clear()
    try:
        assert not has_triton()
    finally:
        loads_triton.cache_clear()
    assert "python3-dev" in caplog.text

"""A CPU's compiled step gives what torch's operations do, from layers to slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.jit.background import InBackground
from cluster.kv.layout_for import kv_layout
from cluster.kv.pool import PagePool
from cluster.model.checkpoint import Checkpoint, open_checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.cpu.step_kernels import StepKernels, build
from decoder_worker.model import HalfHead, TextDecoder
from decoder_worker.model_runner import self_kv_layout
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampler
from decoder_worker.sampling.slots import SlotOptions, SlotTable
from tests.support.checkpoints import cached_checkpoint
from tests.support.reference import assert_close

BUILD_S = 100.0
N = 24  # rows


@pytest.fixture(scope="module")
def kernels() -> InBackground[StepKernels]:
    built = InBackground("test", lambda: build(np.uint16))
    assert built.wait(BUILD_S) is not None
    return built


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(cached_checkpoint("tiny")))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(checkpoint)


def filled_slots(tokenizer: WhisperTokenizer, seed: int) -> SlotTable:
    """Rows in every state of the grammar of timestamps."""
    rng = np.random.default_rng(seed)
    first, eot = tokenizer.special.timestamp_begin, tokenizer.special.eot
    slots = SlotTable(N, "cpu")
    texts: list[list[int]] = []
    for row in range(N):
        stamps = sorted(rng.integers(first, first + 1501, 4).tolist())
        words = rng.integers(0, eot, 3).tolist()
        states = (
            [],
            [stamps[0]],
            [stamps[0], *words],
            [stamps[0], *words, stamps[1]],
            [stamps[0], *words, stamps[1], stamps[1]],
            [stamps[0], *words, stamps[1], stamps[2], *words],
        )
        texts.append(states[row % len(states)])
    options = [SlotOptions(bool(row % 4), 0.0, 0, 1 + 3 * (row % 3)) for row in range(N)]
    positions = [3 + max(0, len(text) - 1) for text in texts]
    slots.load(range(N), options, texts, positions, first)
    return slots


@pytest.mark.parametrize("favoured", ["words", "text", "stamps", "end", "nothing"])
def test_a_choice_is_what_the_rules_and_argmax_give(
    kernels: InBackground[StepKernels], tokenizer: WhisperTokenizer, favoured: str
) -> None:
    special = tokenizer.special
    spans = {
        "words": slice(0, special.eot),
        "text": slice(special.eot, special.timestamp_begin),
        "stamps": slice(special.timestamp_begin, tokenizer.n_vocab),
        "end": slice(special.eot, special.eot + 1),
        "nothing": slice(0, 0),
    }
    for seed in range(4):
        logits = torch.randn(N, tokenizer.n_vocab, generator=torch.Generator().manual_seed(seed))
        logits[:, spans[favoured]] += 6.0 if seed % 2 else 2.0
        index = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
        found = []
        for built in (None, kernels):
            slots = filled_slots(tokenizer, seed)
            sampler = Sampler(LogitRules(tokenizer, 50, "cpu"), slots, built)
            sampled = sampler(logits.clone(), slots.rows(index), None)
            found.append((sampled.tokens, sampled.logprobs, slots.table))
        (tokens, logprobs, table), (ours, our_logprobs, our_table) = found
        assert torch.equal(ours, tokens)
        torch.testing.assert_close(our_logprobs, logprobs, rtol=1e-4, atol=2e-5)
        assert torch.equal(our_table, table)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_logits_says_so_and_leaves_others_alone(
    kernels: InBackground[StepKernels], tokenizer: WhisperTokenizer, value: float
) -> None:
    slots = filled_slots(tokenizer, 0)
    logits = torch.randn(3, tokenizer.n_vocab, generator=torch.Generator().manual_seed(1))
    logits[1, 77] = value
    logits[2] = value
    sampler = Sampler(LogitRules(tokenizer, 50, "cpu"), slots, kernels)
    sampled = sampler(logits, slots.rows(torch.arange(3)), None)
    ruled_out = value == float("-inf")  # of one token that is only never chosen
    assert sampled.logprobs.isfinite().tolist() == [True, ruled_out, False]
    assert 0 <= int(sampled.tokens.min()) <= int(sampled.tokens.max()) < tokenizer.n_vocab


@pytest.mark.parametrize("n", [1, 3, 4, 9])
@pytest.mark.parametrize("threads", [1, 2])
def test_logits_are_the_products_over_float16(
    kernels: InBackground[StepKernels], n: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(n)
    x, weight = torch.randn(n, 384, generator=generator), torch.randn(1001, 384).half()
    head, before = HalfHead(weight, kernels), torch.get_num_threads()
    torch.set_num_threads(threads)
    found = head(x)
    torch.set_num_threads(before)
    assert_close("logits", found, x @ weight.float().t())
    not_yet: InBackground[StepKernels] = InBackground("never", lambda: build(None))
    assert_close("without kernels", HalfHead(weight, not_yet)(x), x @ weight.float().t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_layers_give_the_same_states(checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    model = TextDecoder.load(checkpoint, dtype, "cpu")
    cross, own = (
        PagePool(kv_layout(checkpoint, 0, name), 2),
        PagePool(self_kv_layout(checkpoint, name), 2),
    )
    cross.tensor.normal_(generator=torch.Generator().manual_seed(0))
    attention = TorchAttention(own.tensor, cross.tensor)
    tokens, positions = torch.tensor([50, 60, 70, 7, 8]), torch.tensor([0, 1, 2, 0, 1])
    size = own.layout.page_frames
    batch = AttentionBatch(
        PagedKV.make([3, 2], [[0], [1]], [3, 2], size),
        PagedKV.make([3, 2], [[0], [1]], [1500, 700], 1500),
    )

    def states(kernels: InBackground[StepKernels] | None) -> Tensor:
        object.__setattr__(model, "kernels", kernels)
        attention.plan(batch)
        return model(tokens, positions, attention)

    built = model.kernels
    assert built is not None
    assert built.wait(BUILD_S) is not None
    share = 1e-5 if dtype is torch.float32 else 0.02
    assert_close("states", states(built), states(None), share=share)

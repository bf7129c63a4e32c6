"""The compiled samplers give what torch's does: tokens, probabilities and slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.cpu.sampling_kernels import sample_rows
from decoder_worker.cpu.step_team import StepTeam
from decoder_worker.gpu.greedy import GpuSampler
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, Sampler, TorchSampler
from decoder_worker.sampling.slots import SlotRows, SlotTable
from tests.support.workers.slot_states import N, filled_slots, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return make_tokenizer()


MakeSampler = Callable[[WhisperTokenizer, SlotTable], Sampler]


def by_torch(tokenizer: WhisperTokenizer, slots: SlotTable) -> TorchSampler:
    return TorchSampler(LogitRules(tokenizer, 50, "cpu"), slots)


def compiled(tokenizer: WhisperTokenizer, slots: SlotTable) -> Sampler:
    """What a step of the CPU's decoder ends with."""
    rules = LogitRules(tokenizer, 50, "cpu")

    def sample(logits: Tensor, rows: SlotRows, noisy: Tensor | None, n_top: int = 0) -> Sampled:
        tokens, logprobs = torch.empty_like(rows.index), torch.empty(len(rows.index))
        read = (logits, rows.index, slots.table, rules.suppressed, rules.begin)
        arrays = [one.numpy() for one in read]
        job = partial(sample_rows, *arrays, rules.marks, tokens.numpy(), logprobs.numpy())
        StepTeam(1).run(job, len(tokens))
        return Sampled(tokens, logprobs)

    return sample


def of_a_gpu(tokenizer: WhisperTokenizer, slots: SlotTable) -> GpuSampler:
    rules = LogitRules(tokenizer, 50, "cpu")
    return GpuSampler(TorchSampler(rules, slots), rules, slots)


@pytest.mark.parametrize("own", [compiled, of_a_gpu])
@pytest.mark.parametrize("favoured", ["words", "text", "stamps", "end", "nothing"])
def test_a_choice_is_what_the_rules_and_argmax_give(
    tokenizer: WhisperTokenizer, favoured: str, own: MakeSampler
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
        for make in (by_torch, own):
            slots = filled_slots(tokenizer, seed)
            sampled = make(tokenizer, slots)(logits.clone(), slots.rows(index), None)
            found.append((sampled.tokens, sampled.logprobs, slots.table))
        (tokens, logprobs, table), (ours, our_logprobs, our_table) = found
        assert torch.equal(ours, tokens)
        torch.testing.assert_close(our_logprobs, logprobs, rtol=1e-4, atol=2e-5)
        assert torch.equal(our_table, table)


@pytest.mark.parametrize("own", [by_torch, compiled, of_a_gpu])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_logits_says_so_and_leaves_others_alone(
    tokenizer: WhisperTokenizer, value: float, own: MakeSampler
) -> None:
    slots = filled_slots(tokenizer, 0)
    logits = torch.randn(3, tokenizer.n_vocab, generator=torch.Generator().manual_seed(1))
    logits[1, 77] = value
    logits[2] = value
    sampled = own(tokenizer, slots)(logits, slots.rows(torch.arange(3)), None)
    ruled_out = value == float("-inf")  # of one token that is only never chosen
    assert sampled.logprobs.isfinite().tolist() == [True, ruled_out, False]
    assert 0 <= int(sampled.tokens.min()) <= int(sampled.tokens.max()) < tokenizer.n_vocab

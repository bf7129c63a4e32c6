"""A CPU's compiled sampler gives what torch's does: tokens, probabilities and slots."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.model.checkpoint import Checkpoint, open_checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from decoder_worker.cpu.sampler import CompiledSampler
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import TorchSampler
from decoder_worker.sampling.slots import SlotOptions, SlotTable
from tests.support.checkpoints import cached_checkpoint

BUILD_S = 100.0
N = 24  # rows


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(str(cached_checkpoint("tiny")))


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(checkpoint)


def by_torch(tokenizer: WhisperTokenizer, slots: SlotTable) -> TorchSampler:
    return TorchSampler(LogitRules(tokenizer, 50, "cpu"), slots)


def compiled(tokenizer: WhisperTokenizer, slots: SlotTable) -> CompiledSampler:
    rules = LogitRules(tokenizer, 50, "cpu")
    sampler = CompiledSampler(TorchSampler(rules, slots), rules, slots)
    assert sampler.wait(BUILD_S)
    return sampler


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
    tokenizer: WhisperTokenizer, favoured: str
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
        for make in (by_torch, compiled):
            slots = filled_slots(tokenizer, seed)
            sampled = make(tokenizer, slots)(logits.clone(), slots.rows(index), None)
            found.append((sampled.tokens, sampled.logprobs, slots.table))
        (tokens, logprobs, table), (ours, our_logprobs, our_table) = found
        assert torch.equal(ours, tokens)
        torch.testing.assert_close(our_logprobs, logprobs, rtol=1e-4, atol=2e-5)
        assert torch.equal(our_table, table)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_finite_logits_says_so_and_leaves_others_alone(
    tokenizer: WhisperTokenizer, value: float
) -> None:
    slots = filled_slots(tokenizer, 0)
    logits = torch.randn(3, tokenizer.n_vocab, generator=torch.Generator().manual_seed(1))
    logits[1, 77] = value
    logits[2] = value
    sampled = compiled(tokenizer, slots)(logits, slots.rows(torch.arange(3)), None)
    ruled_out = value == float("-inf")  # of one token that is only never chosen
    assert sampled.logprobs.isfinite().tolist() == [True, ruled_out, False]
    assert 0 <= int(sampled.tokens.min()) <= int(sampled.tokens.max()) < tokenizer.n_vocab

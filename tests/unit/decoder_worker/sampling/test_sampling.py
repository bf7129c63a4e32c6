"""Sampling: greedy and drawn rows side by side, probabilities, and the language's choice."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, TorchSampler, best_of, noise_key
from decoder_worker.sampling.slots import SlotOptions, SlotTable
from tests.support.checkpoints import cached_checkpoint

TEMPERATURES = (0.0, 0.6, 0.0, 1.0)


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return WhisperTokenizer.from_checkpoint(open_checkpoint(str(cached_checkpoint("micro"))))


def filled(tokenizer: WhisperTokenizer, options: Sequence[SlotOptions]) -> SlotTable:
    """Slots before their first token, so many and no more."""
    slots, n = SlotTable(len(options), "cpu"), len(options)
    begin = tokenizer.special.timestamp_begin
    slots.load(range(n), options, [[]] * n, [3] * n, begin)
    return slots


def drawn(row: int) -> SlotOptions:
    return SlotOptions(False, TEMPERATURES[row], noise_key(1, row, 0, 0), 99)


def sample(tokenizer: WhisperTokenizer, rows: list[int], n_steps: int = 3) -> list[Sampled]:
    """Run `rows` of one fixed batch through a sampler that has four slots."""
    slots = filled(tokenizer, [drawn(row) for row in range(4)])
    sampler = TorchSampler(LogitRules(tokenizer, 50, "cpu"), slots)
    generator = torch.Generator().manual_seed(0)
    noisy = [i for i, row in enumerate(rows) if TEMPERATURES[row]]
    outcome = []
    for _ in range(n_steps):
        logits = torch.randn(4, tokenizer.n_vocab, generator=generator)[rows]
        chosen = torch.tensor(noisy) if noisy else None
        outcome.append(sampler(logits, slots.rows(torch.tensor(rows)), chosen))
    return outcome


def test_a_row_is_the_same_in_any_batch(tokenizer: WhisperTokenizer) -> None:
    together = sample(tokenizer, [0, 1, 2, 3])
    for rows in ([0], [1], [3, 1], [2, 0, 3]):
        for step, alone in enumerate(sample(tokenizer, rows)):
            assert torch.equal(alone.tokens, together[step].tokens[rows]), (rows, step)
            assert torch.equal(alone.logprobs, together[step].logprobs[rows]), (rows, step)


def test_noise_for_every_row_changes_no_greedy_one(tokenizer: WhisperTokenizer) -> None:
    """As in a captured step, where who has noise is not known."""
    outcome = []
    for noisy in ([1, 3], [0, 1, 2, 3]):
        slots = filled(tokenizer, [drawn(row) for row in range(4)])
        logits = torch.randn(4, tokenizer.n_vocab, generator=torch.Generator().manual_seed(0))
        sampler = TorchSampler(LogitRules(tokenizer, 50, "cpu"), slots)
        outcome.append(sampler(logits, slots.rows(torch.arange(4)), torch.tensor(noisy)))
    assert torch.equal(outcome[0].tokens, outcome[1].tokens)
    assert torch.equal(outcome[0].logprobs, outcome[1].logprobs)


def test_logprobs_are_of_the_filtered_logits_at_temperature_1(tokenizer: WhisperTokenizer) -> None:
    logits = torch.randn(1, tokenizer.n_vocab, generator=torch.Generator().manual_seed(2))
    slots = filled(tokenizer, [SlotOptions(True, 0.8, 7, 99)])
    rules = LogitRules(tokenizer, 50, "cpu")
    rows = slots.rows(torch.tensor([0]))
    expected = rules.apply(logits.clone(), rows.history).log_softmax(-1)
    sampled = TorchSampler(rules, slots)(logits, rows, torch.tensor([0]))
    torch.testing.assert_close(sampled.logprobs[0], expected[0, sampled.tokens[0]])


def test_not_a_number_is_reported_in_its_row_only(tokenizer: WhisperTokenizer) -> None:
    slots = filled(tokenizer, [SlotOptions(True, 0.0, 0, 99)] * 2)
    logits = torch.randn(2, tokenizer.n_vocab)
    logits[1] = math.nan
    sampled = TorchSampler(LogitRules(tokenizer, 50, "cpu"), slots)(
        logits, slots.rows(torch.arange(2)), None
    )
    assert sampled.logprobs[0].isfinite()
    assert not sampled.logprobs[1].isfinite()


def test_best_of_looks_at_the_allowed_tokens_only() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 5.0], [0.0, 3.0, 1.0, math.nan]])
    best = best_of(logits, torch.tensor([1, 2]))
    assert best.tokens.tolist() == [2, 1]
    torch.testing.assert_close(best.logprobs[0].exp(), torch.tensor([1.0, 2.0]).softmax(0)[1])
    assert not best_of(logits, torch.tensor([1, 3])).logprobs[1].isfinite()

"""Sampling: greedy and drawn rows side by side, probabilities, and the language's choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from whisper.decoding import ApplyTimestampRules, SuppressTokens

from cluster.common.model.checkpoint import open_checkpoint
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.sampling.logit_rules import History, LogitRules
from decoder_worker.sampling.sampler import TorchSampler, best_of, noise_key
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


def test_noise_for_every_row_changes_no_greedy_one(tokenizer: WhisperTokenizer) -> None:
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


def test_best_of_looks_at_the_allowed_tokens_only() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 5.0], [0.0, 3.0, 1.0, math.nan]])
    best = best_of(logits, torch.tensor([1, 2]))
    assert best.tokens.tolist() == [2, 1]
    torch.testing.assert_close(best.logprobs[0].exp(), torch.tensor([1.0, 2.0]).softmax(0)[1])
    assert not best_of(logits, torch.tensor([1, 3])).logprobs[1].isfinite()


# ---- The batched logit rules equal openai/whisper's, row by row, on any logits and history.


MAX_INITIAL = 50
NEVER = -math.inf


def openai_rules(
    tokenizer: WhisperTokenizer, logits: Tensor, sampled: list[int], timed: bool
) -> Tensor:
    """By openai/whisper's filters, for one sequence behind a prompt of one token."""
    special = tokenizer.special
    logits, tokens = logits[None].clone(), torch.tensor([[0, *sampled]])
    if not sampled:
        logits[:, list(tokenizer.begin_suppress_tokens)] = NEVER
    prompt_only = [special.sot, special.sot_prev, special.sot_lm, special.no_speech]
    prompt_only += [special.transcribe, special.translate]
    SuppressTokens([*tokenizer.suppress_tokens, *prompt_only]).apply(logits, tokens)
    if timed:
        ApplyTimestampRules(special, 1, MAX_INITIAL).apply(logits, tokens)  # type: ignore[arg-type]
    return logits[0]


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[tuple[bool, int]], bool, float, int]:
    """A history as (is timestamp, value) pairs, timed or not, a lift of timestamps, a seed."""
    history = draw(
        st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=8)
        | st.lists(st.tuples(st.just(True), st.integers(1495, 1500)), max_size=3)
    )
    lift = draw(st.sampled_from([-20.0, -6.0, -4.0, 0.0, 20.0]))
    return history, draw(st.booleans()), lift, draw(st.integers(0, 2**31))


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5))
def test_rules_equal_openai_whispers(
    batch: list[tuple[list[tuple[bool, int]], bool, float, int]], tokenizer: WhisperTokenizer
) -> None:
    begin = tokenizer.special.timestamp_begin
    rules = LogitRules(tokenizer, MAX_INITIAL, "cpu")
    slots = SlotTable(len(batch), "cpu")
    logits, expected = [], []
    for slot, (history, timed, lift, seed) in enumerate(batch):
        sampled = [begin + value if stamp else value for stamp, value in history]
        slots.load([slot], [SlotOptions(timed, 0.0, 0, 99)], [sampled], [3], begin)
        row = 3 * torch.randn(tokenizer.n_vocab, generator=torch.Generator().manual_seed(seed))
        row[begin:] += lift
        logits.append(row)
        expected.append(openai_rules(tokenizer, row, sampled, timed))
    result = rules.apply(torch.stack(logits), slots.rows(torch.arange(len(batch))).history)
    for slot, row in enumerate(expected):
        assert torch.equal(result[slot], row), f"row {slot}: {batch[slot]}"


def no_history() -> History:
    return SlotTable(1, "cpu").rows(torch.tensor([0])).history


@settings(max_examples=100, deadline=None)
@given(history=st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=8))
def test_history_step_by_step_equals_history_at_once(
    history: list[tuple[bool, int]], tokenizer: WhisperTokenizer
) -> None:
    begin = tokenizer.special.timestamp_begin
    sampled = [begin + value if stamp else value for stamp, value in history]
    slots = SlotTable(2, "cpu")
    slots.load([1], [SlotOptions(True, 0.0, 0, 99)], [sampled], [3], begin)
    loaded = slots.rows(torch.tensor([1])).history
    steps = no_history()
    steps.timed[:] = True
    for token in sampled:
        steps = steps.after(torch.tensor([token]), begin)
    for name in ("n_sampled", "last_is_timestamp", "before_is_timestamp", "last_timestamp"):
        assert getattr(steps, name)[0] == getattr(loaded, name)[0], name


def test_first_timestamp_is_unlimited_without_a_limit(tokenizer: WhisperTokenizer) -> None:
    rules = LogitRules(tokenizer, None, "cpu")
    history = no_history()
    history.timed[:] = True
    logits = rules.apply(torch.zeros(1, tokenizer.n_vocab), history)
    assert logits[0, tokenizer.special.timestamp_begin :].isfinite().all()
    assert not logits[0, : tokenizer.special.timestamp_begin].isfinite().any()


def test_prompt_only_tokens_are_never_sampled(tokenizer: WhisperTokenizer) -> None:
    bare = replace(tokenizer, suppress_tokens=(), begin_suppress_tokens=())
    logits = LogitRules(bare, MAX_INITIAL, "cpu").apply(torch.zeros(1, bare.n_vocab), no_history())
    special = bare.special
    for token in (special.sot, special.sot_prev, special.no_speech, special.translate):
        assert logits[0, token] == NEVER
    assert logits[0, special.eot].isfinite()

"""Beam search and candidates against openai-whisper's own decoders, on random probabilities."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from whisper.decoding import BeamSearchDecoder, GreedyDecoder, MaximumLikelihoodRanker

from decoder_worker.sampling.search import (
    BeamSearch,
    CandidateSearch,
    Hypothesis,
    Row,
    StepOutput,
    rank,
)

EOT = 0
N_VOCAB = 12


class History:
    """Stands for the model: logits are a function of the tokens so far, so rows may move."""

    def __init__(self, seed: int, eot_bias: float) -> None:
        self._seed, self._eot_bias = seed, eot_bias

    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash((self._seed, tokens)) & 0x7FFF_FFFF)
        logits = 2 * torch.randn(N_VOCAB, generator=generator)
        logits[EOT] += self._eot_bias if tokens else -100.0
        return logits


class NoCache:
    """openai-whisper's inference: its cache follows the beams, ours is a function of tokens."""

    def rearrange_kv_cache(self, source_indices: list[int]) -> None:
        pass


def openai_search(decoder: Any, history: History, n_rows: int, n_steps: int, penalty: Any) -> Any:
    """openai-whisper's main loop around one of its decoders: (tokens, sum of logprobs)."""
    tokens = torch.zeros(n_rows, 1, dtype=torch.long) + 99  # a prompt of one token
    sums = torch.zeros(n_rows)
    for _ in range(n_steps):
        rows = [tuple(row[1:]) for row in tokens.tolist()]
        # A greedy row that ended is fed on; what it samples then does not count.
        logits = torch.stack([history.logits(row) for row in rows])
        tokens, completed = decoder.update(tokens, logits, sums)
        if completed:
            break
    finished, scores = decoder.finalize(tokens.reshape(1, n_rows, -1), sums.reshape(1, n_rows))
    texts = [[t[1 : (t == EOT).nonzero()[0, 0]] for t in s] for s in finished]
    best = MaximumLikelihoodRanker(penalty).rank(texts, scores)[0]
    return tuple(texts[0][best].tolist()), scores[0][best]


def our_search(search: Any, history: History) -> Hypothesis:
    """Each step's outputs as the runner would give them; copies carry the KV, here nothing."""
    while not search.done:
        search.take(step_outputs(search, history))
    return search.best()


def step_outputs(search: Any, history: History) -> list[StepOutput]:
    outputs = []
    for row in search.live:
        logprobs = history.logits(tuple(row.tokens)).log_softmax(-1)
        top = logprobs.topk(max(1, search.n_top))
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        outputs.append(StepOutput(*pairs[0], top=pairs))
    return outputs


@pytest.mark.parametrize(
    ("beam_size", "patience"), [(1, 1.0), (2, 0.5), (2, 1.0), (5, 0.5), (5, 1.0), (5, 2.0)]
)
@pytest.mark.parametrize("penalty", [None, 0.0, 1.0])
def test_beam_search_finds_what_openai_whisper_finds(
    beam_size: int, patience: float, penalty: float | None
) -> None:
    for seed in range(20):
        history = History(seed, eot_bias=seed % 4)
        decoder = BeamSearchDecoder(beam_size, EOT, NoCache(), patience)  # type: ignore[arg-type]
        tokens, total = openai_search(decoder, history, beam_size, 9, penalty)
        rows = [Row(slot, (slot,)) for slot in range(beam_size)]
        ours = our_search(BeamSearch(rows, EOT, 9, penalty, patience), history)
        assert ours.tokens == tokens, seed
        assert ours.sum_logprob == pytest.approx(total, abs=1e-4)
        assert len(ours.logprobs) == len(ours.tokens)


def test_greedy_is_openai_whispers() -> None:
    for seed in range(20):
        history = History(seed, eot_bias=1.0)
        tokens, total = openai_search(GreedyDecoder(0.0, EOT), history, 1, 9, None)
        ours = our_search(CandidateSearch([Row(0, ())], EOT, 9, None), history)
        assert ours.tokens == tokens
        assert ours.sum_logprob == pytest.approx(total, abs=1e-4)


def test_copies_bring_every_beam_its_own_history() -> None:
    """Rows played as memory: after each copy, a row holds the tokens of its hypothesis."""
    rng = random.Random(0)
    for seed in range(30):
        history = History(seed, eot_bias=rng.uniform(-2, 2))
        rows = [Row(slot, (slot,)) for slot in range(4)]
        search = BeamSearch(rows, EOT, 9, None)
        memory: dict[int, list[int]] = {row.slot: [] for row in rows}
        while not search.done:
            copies = search.take(step_outputs(search, history))
            targets = {copy.target.slot for copy in copies}
            assert not targets & {copy.source.slot for copy in copies}
            for copy in copies:
                memory[copy.target.slot] = list(memory[copy.source.slot])
            for row in search.live if not search.done else ():
                assert memory[row.slot] == row.tokens[:-1], "the KV of another hypothesis"
                memory[row.slot].append(row.tokens[-1])


def test_the_likeliest_per_token_wins_and_a_penalty_changes_who() -> None:
    short = Hypothesis((1,), (-1.0,), -1.0, True)
    long = Hypothesis((1, 2, 3, 4), (-0.6,) * 4, -2.4, True)
    assert rank([short, long], None) is long
    assert rank([short, long], 0.0) is short
    assert long.avg_logprob == -2.4 / 5, "the end of text counts"

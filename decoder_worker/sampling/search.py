"""Grows an attempt's hypotheses and picks the winner, as openai/whisper's `decoding.py` does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True, eq=False)
class Row:
    """One place in the batch with the hypothesis that grows there.

    slot, self_pages: held from admission to release. candidate: selects its sampling noise. tokens,
    logprobs: after the prompt, without end-of-text, which `sum_logprob` includes.
    """

    slot: int
    self_pages: tuple[int, ...]
    candidate: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sum_logprob: float = 0.0
    ended: bool = False

    def clear(self) -> None:
        self.tokens, self.logprobs, self.sum_logprob, self.ended = [], [], 0.0, False


@dataclass(frozen=True, slots=True)
class StepOutput:
    """no_speech_prob: of prompts only. top: the likeliest tokens, best first, for beam search."""

    token: int
    logprob: float
    no_speech_prob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished candidate: tokens without end-of-text, the sum of log probabilities with it."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sum_logprob: float
    ended: bool  # False: it was cut at the length limit

    @property
    def avg_logprob(self) -> float:
        return self.sum_logprob / (len(self.tokens) + 1)

    @classmethod
    def of(cls, row: Row) -> Hypothesis:
        return cls(tuple(row.tokens), tuple(row.logprobs), row.sum_logprob, row.ended)


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Self-attention KV to copy before the next step."""

    source: Row
    target: Row


class Search(Protocol):
    """One attempt. `live`: the rows to feed next; `n_top`: the candidates needed of each row.

    runs_ahead: a row is always fed what was sampled for it, so a step may be launched before the
    host has seen the last one's outcome.
    """

    live: list[Row]
    n_top: int
    runs_ahead: bool

    def take(self, outputs: Sequence[StepOutput]) -> list[RowCopy]:
        """Take a step's outputs, one for each live row, in order; returns the copies to make."""

    @property
    def done(self) -> bool: ...

    def best(self) -> Hypothesis: ...


class CandidateSearch:
    """Every row is a candidate of its own; the likeliest wins."""

    n_top = 0

    def __init__(
        self, rows: Sequence[Row], eot: int, n_new_max: int, length_penalty: float | None
    ) -> None:
        self._rows = list(rows)
        self._eot = eot
        self._n_new_max = n_new_max
        self._length_penalty = length_penalty
        self._spread = False
        self.live = list(rows)
        self.runs_ahead = len(self.live) == 1

    def take(self, outputs: Sequence[StepOutput]) -> list[RowCopy]:
        live = []
        for row, output in zip(self.live, outputs, strict=True):
            row.sum_logprob += output.logprob
            if output.token == self._eot:
                row.ended = True
                continue
            row.tokens.append(output.token)
            row.logprobs.append(output.logprob)
            if len(row.tokens) < self._n_new_max:
                live.append(row)
        self.live = live
        if self._spread:
            return []
        self._spread = True  # the prompt ran in the first row alone
        return [RowCopy(self._rows[0], row) for row in self.live if row is not self._rows[0]]

    @property
    def done(self) -> bool:
        return not self.live

    def best(self) -> Hypothesis:
        return rank([Hypothesis.of(row) for row in self._rows], self._length_penalty)


class BeamSearch:
    """Keeps the likeliest continuations of all beams together."""

    runs_ahead = False

    def __init__(
        self,
        rows: Sequence[Row],
        eot: int,
        n_new_max: int,
        length_penalty: float | None,
        patience: float = 1.0,
    ) -> None:
        self._rows = list(rows)
        self._eot = eot
        self._n_new_max = n_new_max
        self._length_penalty = length_penalty
        self._max_finished = max(1, round(len(rows) * patience))
        self._finished: list[Hypothesis] = []
        self.n_top = len(rows) + 1
        self.live = [self._rows[0]]  # all beams begin with the prompt

    def take(self, outputs: Sequence[StepOutput]) -> list[RowCopy]:
        ended: list[Hypothesis] = []
        grown: list[tuple[Row, int, float, float]] = []  # row, token, its logprob, the sum
        for row, token, logprob, total in self._continuations(outputs):
            if token == self._eot:
                ended.append(Hypothesis(tuple(row.tokens), tuple(row.logprobs), total, True))
            else:
                grown.append((row, token, logprob, total))
                if len(grown) == len(self._rows):
                    break
        room = self._max_finished - len(self._finished)
        self._finished += ended[: max(0, room)]
        return self._settle(grown)

    def _continuations(self, outputs: Sequence[StepOutput]) -> list[tuple[Row, int, float, float]]:
        """All continuations of the beams, best first; ties stay in the order of the beams."""
        found = [
            (row, token, logprob, row.sum_logprob + logprob)
            for row, output in zip(self.live, outputs, strict=True)
            for token, logprob in output.top[: self.n_top]
        ]
        return sorted(found, key=lambda item: item[3], reverse=True)

    def _settle(self, grown: list[tuple[Row, int, float, float]]) -> list[RowCopy]:
        """Give each continuation a row; no row is both copied from and copied to."""
        kept = {id(row) for row, *_ in grown}
        free = [row for row in self._rows if id(row) not in kept]
        claimed: set[int] = set()
        copies: list[RowCopy] = []
        planned: list[tuple[Row, list[int], list[float], float]] = []
        for source, token, logprob, total in grown:
            target = source
            if id(source) in claimed:
                target = free.pop()
                copies.append(RowCopy(source, target))
            claimed.add(id(source))
            planned.append((target, [*source.tokens, token], [*source.logprobs, logprob], total))
        self.live = []
        for target, tokens, logprobs, total in planned:
            target.tokens, target.logprobs, target.sum_logprob = tokens, logprobs, total
            self.live.append(target)
        return [] if self.done else copies

    @property
    def done(self) -> bool:
        if len(self._finished) >= self._max_finished or not self.live:
            return True
        return len(self.live[0].tokens) >= self._n_new_max

    def best(self) -> Hypothesis:
        """Unfinished beams count if too few hypotheses have ended."""
        found = list(self._finished)
        for row in sorted(self.live, key=lambda row: row.sum_logprob, reverse=True):
            if len(found) >= len(self._rows):
                break
            found.append(Hypothesis.of(row))
        return rank(found, self._length_penalty)


def rank(hypotheses: Sequence[Hypothesis], length_penalty: float | None) -> Hypothesis:
    """The likeliest per token, or by Google's length penalty (arXiv 1609.08144, equation 14)."""

    def score(hypothesis: Hypothesis) -> float:
        length = max(1, len(hypothesis.tokens))
        if length_penalty is None:
            value = hypothesis.sum_logprob / length
        else:
            value = hypothesis.sum_logprob / ((5 + length) / 6) ** length_penalty
        return -math.inf if math.isnan(value) else value

    return max(hypotheses, key=score)

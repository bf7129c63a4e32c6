"""Launches sequences at fixed sizes, which can be captured, where their shape allows it.

Prompts are padded to one of a few lengths, and a search's rows to one of a few numbers. Searches
sample outside the captured part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.common.kernels.gpu.self_check import GRAPHS, is_right
from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.gpu.graphs import (
    BatchRow,
    Buckets,
    Common,
    Form,
    Outcome,
    bucket_sizes,
    call_again,
    capture_on,
    few_sizes,
)
from decoder_worker.model import TextDecoder
from decoder_worker.prompts import SOT_TOKENS
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.scheduling.sequence import DecodeSequence
from decoder_worker.step import DecodeStep, Launched, Readback, launched

MAX_PROMPTS = 16  # in the largest bucket of prompts: more arrive at once only where many waited
MAX_PROMPT_TOKENS = 512  # in one bucket
CONTEXT_LENGTHS = (32, 64, 128)  # of prompts with context, besides the longest possible one
SHARING = (2, 5, 8)  # rows of a window: five beams or candidates is what is usually asked for

Ragged = Callable[[Sequence[DecodeSequence]], Readback]
SAMPLED = (Outcome.GREEDY, Outcome.NOISY)


class FixedSizes:
    """Buckets for prompts, languages and decode steps. For one thread and one stream at a time."""

    def __init__(
        self,
        decoder_for: Callable[[int, int, int], TextDecoder],
        step: DecodeStep,
        slots: SlotTable,
        tokenizer: WhisperTokenizer,
        cross_layout: PageLayout,
        self_pool: PagePool,
        sample: Callable[..., Readback],
    ) -> None:
        """Takes one page of the self pool for good.

        decoder_for: makes a decoder of (rows, tokens of each row, rows that share a window).
        sample: launches the sampling from the rows' logits, as `ModelRunner` does.
        """
        scratch = self_pool.allocate(1)
        assert scratch is not None, "the self pool has no page for inert rows"
        n_slots, layout = slots.inert, self_pool.layout
        self._sot = (tokenizer.special.sot,)
        self._sample = sample
        self._window = (cross_layout.pages_per_window, cross_layout.n_frames)
        rows = max(n_slots, MAX_PROMPTS)
        common = Common(
            step=step,
            inert=BatchRow(slots.inert, scratch * layout.pages_per_window, 1, (0,), 1),
            page_sizes=(layout.page_frames, cross_layout.page_frames),
            logits=torch.zeros(rows, tokenizer.n_vocab, dtype=torch.float32, device=slots.device),
            device=slots.device,
        )
        self._slots = slots

        def make(form: Form, sizes: list[int]) -> Buckets:
            n_tokens, sharing = max(1, form.n_tokens), form.n_sharing
            return Buckets(
                common, form, lambda n_rows: decoder_for(n_rows, n_tokens, sharing), sizes
            )

        everything = (*SAMPLED, Outcome.LOGITS)
        self._steps = {1: make(Form(0, everything), bucket_sizes(n_slots))}
        for n in SHARING:
            if n <= n_slots:
                self._steps[n] = make(Form(0, (Outcome.LOGITS,), n), few_sizes(n_slots // n, 4))
        most = min(n_slots, MAX_PROMPTS)
        self._prompts: dict[int, Buckets] = {}  # by their tokens, the shortest first
        for n in _start_lengths(tokenizer):
            self._prompts[n] = make(Form(n, everything), few_sizes(most, 2))
        longest = layout.n_frames // 2 + SOT_TOKENS + 1
        for n in (*(n for n in CONTEXT_LENGTHS if n < longest), longest):
            fit = max(1, MAX_PROMPT_TOKENS // n)
            self._prompts[n] = make(Form(n, (Outcome.LOGITS,)), few_sizes(min(most, fit), 4))
        self._languages = make(Form(1, (Outcome.LOGITS,)), few_sizes(most, 4))

    def capture(self) -> None:
        """Capture every bucket before the first launch; without graphs where a capture fails."""
        every = (*self._steps.values(), *self._prompts.values(), self._languages)
        capture = capture_on(self._slots.device)

        def captured() -> list[Tensor]:
            for buckets in every:
                buckets.capture_all(*self._window, capture)
            return []

        if capture is call_again:
            captured()
        elif not is_right(GRAPHS, captured, list):
            capture = call_again
            captured()

    def languages(
        self,
        sequences: Sequence[DecodeSequence],
        choose: Callable[[Sequence[DecodeSequence], Tensor], Readback],
    ) -> list[Readback]:
        """Launch language detections, in order. choose: takes the languages from logits."""
        found = []
        for part in _parts(sequences, self._languages.max_windows):
            windows = [[self._row(sequence, self._sot)] for sequence in part]
            logits, _ = self._languages.logits(windows)
            found.append(choose(part, logits))
        return found

    def prefill(self, sequences: Sequence[DecodeSequence], ragged: Ragged) -> Launched:
        """Launch prompts; `ragged` launches those too long for any bucket."""

        def bucket_of(sequence: DecodeSequence) -> Buckets | None:
            n_tokens = len(sequence.prompt.tokens)
            return next((own for n, own in self._prompts.items() if n >= n_tokens), None)

        def rows_of(sequence: DecodeSequence) -> list[BatchRow]:
            prompt = sequence.prompt
            return [self._row(sequence, prompt.tokens, prompt.sot)]

        return self._launch(sequences, bucket_of, rows_of, ragged)

    def decode(self, sequences: Sequence[DecodeSequence], ragged: Ragged) -> Launched:
        """Launch a decode step; `ragged` launches sequences with too many rows for any bucket."""

        def bucket_of(sequence: DecodeSequence) -> Buckets | None:
            n_rows = len(sequence.live)
            return next((buckets for n, buckets in self._steps.items() if n >= n_rows), None)

        return self._launch(sequences, bucket_of, self._live_rows, ragged)

    def _launch(
        self,
        sequences: Sequence[DecodeSequence],
        bucket_of: Callable[[DecodeSequence], Buckets | None],
        rows_of: Callable[[DecodeSequence], list[BatchRow]],
        ragged: Ragged,
    ) -> Launched:
        parts: dict[tuple[Buckets | None, bool], list[DecodeSequence]] = {}
        for sequence in sequences:
            buckets = bucket_of(sequence)
            samples = buckets is not None and Outcome.GREEDY in buckets.form.outcomes
            key = (buckets, samples and sequence.runs_ahead)
            parts.setdefault(key, []).append(sequence)
        order: list[DecodeSequence] = []
        readbacks = []
        for (buckets, samples), own in parts.items():
            order += own
            if buckets is None:
                readbacks.append(ragged(own))
                continue
            for part in _parts(own, buckets.max_windows):
                windows = [rows_of(sequence) for sequence in part]
                if samples:
                    noisy = any(sequence.temperature > 0 for sequence in part)
                    readbacks.append(buckets.launch(windows, SAMPLED[noisy]))
                else:
                    readbacks.append(self._sample(part, *buckets.logits(windows)))
        return launched(order, *readbacks)

    def _live_rows(self, sequence: DecodeSequence) -> list[BatchRow]:
        return [
            BatchRow(
                slot=row.slot,
                self_pages=row.self_pages,
                length=sequence.n_cached(row) + sequence.n_ahead + 1,
                cross_pages=sequence.cross_pages,
                n_frames=sequence.n_positions,
            )
            for row in sequence.live
        ]

    def _row(self, sequence: DecodeSequence, tokens: tuple[int, ...], sot: int = 0) -> BatchRow:
        """The row of a prompt, which runs in the sequence's first row."""
        row = sequence.rows[0]
        return BatchRow(
            row.slot, row.self_pages, 0, sequence.cross_pages, sequence.n_positions, tokens, sot
        )


def _parts(sequences: Sequence[DecodeSequence], n: int) -> list[Sequence[DecodeSequence]]:
    return [sequences[begin : begin + n] for begin in range(0, len(sequences), n)]


def _start_lengths(tokenizer: WhisperTokenizer) -> list[int]:
    """Lengths of the start sequences with and without timestamps."""
    language = tokenizer.languages[0]
    starts = {len(tokenizer.sot_sequence(language, "transcribe", timed)) for timed in (True, False)}
    return sorted(starts)

"""Which sequences of a forward run at fixed sizes, and their launches.

Decode steps, and prompts that are a start sequence and nothing else, run in the buckets of
`decoder_worker.gpu.graphs`. What a search decides about runs beside them, so that its rows share
their window's pages, and so do prompts with context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cluster.kv.layout import PageLayout
from cluster.kv.pool import PagePool
from cluster.model.tokenizer import WhisperTokenizer
from decoder_worker.gpu.graphs import BatchRow, Buckets
from decoder_worker.launched import Launched, launched
from decoder_worker.model import TextDecoder
from decoder_worker.readback import Readback
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.sequence import DecodeSequence
from decoder_worker.step import DecodeStep

MAX_PROMPTS = 16  # in the largest bucket of prompts: more arrive at once only where many waited

Ragged = Callable[[Sequence[DecodeSequence]], Readback]


class FixedSizes:
    """Buckets for decode steps and for start sequences. For one thread and one stream at a time."""

    def __init__(
        self,
        decoder_for: Callable[[int, int], TextDecoder],
        step: DecodeStep,
        slots: SlotTable,
        tokenizer: WhisperTokenizer,
        cross_layout: PageLayout,
        self_pool: PagePool,
    ) -> None:
        """Takes one page of the self pool for good.

        decoder_for: makes the decoder of so many rows, of so many tokens each.
        """
        scratch = self_pool.allocate(1)
        assert scratch is not None, "the self pool has no page for inert rows"
        self._window = (cross_layout.pages_per_window, cross_layout.n_frames)
        self._buckets: dict[int, Buckets] = {}  # by the tokens of a prompt; 0: decode steps
        for n_tokens in (0, *_start_lengths(tokenizer)):
            n_slots = slots.inert
            self._buckets[n_tokens] = Buckets(
                step,
                lambda n_rows, n=n_tokens: decoder_for(n_rows, max(1, n)),  # type: ignore[misc]
                inert=BatchRow(
                    slot=slots.inert,
                    self_pages=scratch,
                    length=max(1, n_tokens),
                    cross_pages=(0,),
                    n_frames=1,
                    tokens=(0,) * n_tokens,
                ),
                page_sizes=(self_pool.layout.page_frames, cross_layout.page_frames),
                max_batch=min(n_slots, MAX_PROMPTS) if n_tokens else n_slots,
                device=self_pool.device,
            )

    def capture(self) -> None:
        """Capture every bucket; before the first launch."""
        for buckets in self._buckets.values():
            buckets.capture_all(*self._window)

    def prefill(self, sequences: Sequence[DecodeSequence], ragged: Ragged) -> Launched:
        """Launch prompts; `ragged` launches those that have no bucket."""
        return self._launch(sequences, _start_length, ragged)

    def decode(self, sequences: Sequence[DecodeSequence], ragged: Ragged) -> Launched:
        """The same of a decode step."""
        return self._launch(sequences, lambda s: 0 if s.runs_ahead else None, ragged)

    def _launch(
        self,
        sequences: Sequence[DecodeSequence],
        key: Callable[[DecodeSequence], int | None],
        ragged: Ragged,
    ) -> Launched:
        order: list[DecodeSequence] = []
        readbacks = []
        for n_tokens, buckets in self._buckets.items():
            own = [s for s in sequences if key(s) == n_tokens]
            for begin in range(0, len(own), buckets.max_batch):
                part = own[begin : begin + buckets.max_batch]
                rows = [self._batch_row(s, n_tokens) for s in part]
                readbacks.append(buckets.launch(rows, any(s.temperature > 0 for s in part)))
                order += part
        if others := [s for s in sequences if key(s) not in self._buckets]:
            readbacks.append(ragged(others))
            order += others
        return launched(order, *readbacks)

    def _batch_row(self, sequence: DecodeSequence, n_tokens: int) -> BatchRow:
        row = sequence.live[0]
        return BatchRow(
            slot=row.slot,
            self_pages=row.self_pages,
            length=n_tokens or sequence.n_cached(row) + sequence.n_ahead + 1,
            cross_pages=sequence.cross_pages,
            n_frames=sequence.n_positions,
            tokens=sequence.prompt.tokens if n_tokens else (),
        )


def _start_lengths(tokenizer: WhisperTokenizer) -> list[int]:
    """Tokens of the start sequences that there are: with timestamps and without."""
    language = tokenizer.languages[0]
    starts = {len(tokenizer.sot_sequence(language, "transcribe", timed)) for timed in (True, False)}
    return sorted(starts)


def _start_length(sequence: DecodeSequence) -> int | None:
    """The length of a prompt that is a start sequence; None for others."""
    prompt = sequence.prompt
    return len(prompt.tokens) if sequence.runs_ahead and prompt.sot == 0 else None

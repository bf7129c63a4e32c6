"""Runs the model over sequences: language detection, prompts, decode steps, word alignment.

A launch writes only to its sequences' pages and slots, so after an error it can be repeated for
fewer sequences, after `restore`. Further steps may be launched before its results are collected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import inf

import torch
from torch import Tensor

from cluster.common.kv.layout import PageLayout
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.streams import DECODE_PRIORITY, new_stream, on_stream, synchronize, upload
from cluster.common.model.text.quality import is_silence
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import split_tokens
from decoder_worker.alignment import Aligner, KnownText, PendingAlignment
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.backends import Decoders, choose_sampler
from decoder_worker.gpu.fixed_sizes import FixedSizes
from decoder_worker.sampling.logit_rules import LogitRules
from decoder_worker.sampling.sampler import Sampled, best_of
from decoder_worker.sampling.search import Row, RowCopy, StepOutput
from decoder_worker.sampling.slots import SlotTable
from decoder_worker.scheduling.sequence import DecodeSequence, chosen_attempt
from decoder_worker.step import DecodeStep, Launched, Readback, launched, outputs_of, read_back

MAX_INITIAL_TIMESTAMP = 50  # steps of 20 ms: openai/whisper's max_initial_timestamp of 1.0 s


def self_kv_layout(checkpoint: Checkpoint, dtype: str, page_tokens: int = 0) -> PageLayout:
    """Layout of one sequence's self-attention KV, for the longest text.

    page_tokens: 0 takes the whole text context, which attention on a CPU reads without a gather.
    """
    dims = checkpoint.dims
    return PageLayout(
        model="self",
        n_layer=dims.n_text_layer,
        n_head=dims.n_text_head,
        head_dim=dims.text_head_dim,
        n_frames=dims.n_text_ctx,
        page_frames=page_tokens or dims.n_text_ctx,
        dtype=dtype,
    )


class ModelRunner:
    """Owns weights, self-attention pool and slots. For one thread at a time, and one stream."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: WhisperTokenizer,
        cross_pool: PagePool,
        self_pool: PagePool,
        n_slots: int,
        decoders: Decoders,
    ) -> None:
        """decoders: over the two pools; for fixed sizes, one page is taken for good."""
        self._tokenizer = tokenizer
        self._device = self_pool.device
        self._stream = new_stream(self._device, DECODE_PRIORITY)
        self._cross_layout, self._self_layout = cross_pool.layout, self_pool.layout
        self._self_pool = self_pool.tensor
        self._decoder, several = decoders.ragged, decoders.several
        self._several = several
        # After `listen`, `interrupt` on any thread ends `decode_several` with its current step.
        self.listen = _nothing if several is None else several.listen
        self.interrupt = _nothing if several is None else several.interrupt
        listed = checkpoint.generation_config.get("max_initial_timestamp_index")
        limit = MAX_INITIAL_TIMESTAMP if listed is None else int(listed)
        self._slots = SlotTable(n_slots, self._device)
        self._rules = LogitRules(tokenizer, limit, self._device)
        sampler = choose_sampler(self._rules, self._slots)
        self._step = DecodeStep(sampler, self._slots, tokenizer.special.no_speech)
        self._aligner = Aligner(
            checkpoint, tokenizer, decoders.ragged, decoders.torch, cross_pool, self_pool
        )
        known = tokenizer.special.languages.items()
        self._language_tokens = torch.tensor(
            [token for code, token in known if code in tokenizer.languages],
            dtype=torch.int64,
            device=self._device,
        )
        self._fixed: FixedSizes | None = None
        if decoders.fixed is not None:
            self._fixed = FixedSizes(
                decoders.fixed,
                self._step,
                self._slots,
                tokenizer,
                cross_pool.layout,
                self_pool,
                self._sample,
            )
        # All of this was made on another stream, the buffers of the buckets too. From here on
        # only the runner's own stream touches it.
        if self._stream is not None:
            synchronize(self._device)
        if self._fixed is not None:
            with self._on_device():
                self._fixed.capture()
            synchronize(self._device)  # a capture's first runs have read pages: READs may begin now

    def detect_language(self, sequences: Sequence[DecodeSequence]) -> Launched:
        """Launch the detection of languages; overwrites the first position's self KV."""
        with self._on_device():
            if self._fixed is not None:
                readbacks = self._fixed.languages(sequences, self._choose_languages)
            else:
                sot = (self._tokenizer.special.sot,)
                logits = self._decoder.logits(self._forward(sequences, [sot] * len(sequences)))
                readbacks = [self._choose_languages(sequences, logits)]
            return Launched(tuple(sequences), (1,) * len(sequences), tuple(readbacks))

    def _choose_languages(self, sequences: Sequence[DecodeSequence], logits: Tensor) -> Readback:
        """Choose the likeliest allowed languages. logits: float32 [n, n_vocab], changed."""
        for row, sequence in zip(logits, sequences, strict=True):
            if allowed := sequence.options.languages:
                known = self._tokenizer.special.languages.items()
                row[self._indices([token for code, token in known if code not in allowed])] = -inf
        return read_back(best_of(logits, self._language_tokens))

    def prefill(self, sequences: Sequence[DecodeSequence]) -> Launched:
        """Run prompts, each in its sequence's first row; all live rows sample from its logits."""
        with self._on_device():
            self._restore(sequences)
            if self._fixed is not None:
                return self._fixed.prefill(sequences, self._prefill_ragged)
            if self._several is None:
                return launched(sequences, self._prefill_ragged(sequences))
            parts = self._several.forwards([len(s.prompt.tokens) for s in sequences])
            each = [[sequences[i] for i in part] for part in parts]
            readbacks = [self._prefill_ragged(part) for part in each]
            return launched([sequence for part in each for sequence in part], *readbacks)

    def decode(self, sequences: Sequence[DecodeSequence]) -> Launched:
        with self._on_device():
            if self._fixed is not None:
                return self._fixed.decode(sequences, self._decode_ragged)
            return launched(sequences, self._decode_ragged(sequences))

    def most_steps(self, sequences: Sequence[DecodeSequence]) -> int:
        """How many steps `decode_several` may run of these now; 1 if it takes none of them."""
        if self._several is None or not all(_goes_on_alone(s) for s in sequences):
            return 1
        n_left = min(s.n_new_max - len(s.live[0].tokens) for s in sequences)
        return min(n_left, self._several.most_steps(len(sequences)))

    def decode_several(
        self, sequences: Sequence[DecodeSequence], most: int
    ) -> list[list[list[StepOutput]]]:
        """Run up to `most` steps, as `most_steps` allows; each step's outputs as from `collect`."""
        assert self._several is not None
        with self._on_device():
            rows = [(s, s.live[0], s.n_cached(s.live[0]) + 1) for s in sequences]
            self._plan(rows, [1] * len(rows))
            slots = self._indices([row.slot for _, row, _ in rows])
            tokens, logprobs = self._several.steps(slots, self._slots, self._rules, most)
        made = zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return [[[StepOutput(*one)] for one in zip(*step, strict=True)] for step in made]

    def _prefill_ragged(self, sequences: Sequence[DecodeSequence]) -> Readback:
        fed = [s.prompt.tokens for s in sequences]
        states = self._forward(sequences, fed)
        begins = list(accumulate(map(len, fed), initial=0))
        sots = [begin + s.prompt.sot for begin, s in zip(begins[:-1], sequences, strict=True)]
        lasts = [end - 1 for end in begins[1:]]
        # Both in one pass over the weights.
        both = self._decoder.logits(states[self._indices([*sots, *lasts])])
        no_speech = self._step.no_speech_probs(both[: len(fed)])
        return self._sample(sequences, both[len(fed) :], no_speech)

    def _decode_ragged(self, sequences: Sequence[DecodeSequence]) -> Readback:
        rows = [(s, row) for s in sequences for row in s.live]
        slots, noisy, n_top = self._sampling(sequences)
        several = self._several if noisy is None and not n_top else None
        takes = several is not None and several.takes(len(rows))  # asked before it plans
        self._plan([(s, row, s.n_cached(row) + s.n_ahead + 1) for s, row in rows], [1] * len(rows))
        if several is not None and takes:
            (token,), (logprob,) = several.steps(slots, self._slots, self._rules, 1)
            return read_back(Sampled(token, logprob))
        return read_back(self._step(slots, self._decoder, noisy, n_top))

    def _sample(
        self, sequences: Sequence[DecodeSequence], logits: Tensor, no_speech: Tensor | None
    ) -> Readback:
        """Sample the next token of every live row.

        logits: float32 [n, n_vocab], of each live row, or of each sequence for prompts; changed.
        no_speech: float32 [len(sequences)] for prompts, None for decode steps.
        """
        repeats = [len(s.live) for s in sequences]
        if no_speech is not None and max(repeats) > 1:
            sources = self._indices([i for i, n in enumerate(repeats) for _ in range(n)])
            logits, no_speech = logits[sources], no_speech[sources]
        slots, noisy, n_top = self._sampling(sequences)
        return read_back(self._step.sample(logits, slots, noisy, n_top), no_speech)

    def collect(self, launch: Launched) -> list[list[StepOutput]]:
        outputs = (output for each in launch.readbacks for output in outputs_of(each))
        return [[next(outputs) for _ in range(n)] for n in launch.n_rows]

    def align(self, sequences: Sequence[DecodeSequence]) -> list[PendingAlignment | None]:
        """Launch the alignment of each text, if any; overwrites each first row's self KV."""
        texts = [(s, text_to_align(s, self._tokenizer)) for s in sequences]
        items = [_known_text(s, text) for s, text in texts if text]
        with self._on_device():
            found = iter(self._aligner.align(items) if items else [])
        return [next(found) if text else None for _, text in texts]

    def peaks(self, sequences: Sequence[DecodeSequence]) -> list[tuple[int, ...]]:
        """Find each text's peaks; overwrites each first row's self KV behind its prompt."""
        texts = [s.attempts[chosen_attempt(s)].hypothesis.tokens for s in sequences]
        both = zip(sequences, texts, strict=True)
        items = [_known_text(s, text) for s, text in both if text]
        with self._on_device():
            found = iter(self._aligner.peaks(items) if items else [])
        return [next(found) if text else () for text in texts]

    def restore(self, sequence: DecodeSequence) -> None:
        """Set the slots of the live rows to what the host knows that they have sampled."""
        with self._on_device():
            self._restore([sequence])

    def _restore(self, sequences: Sequence[DecodeSequence]) -> None:
        rows = [(s, row) for s in sequences for row in s.live]
        self._slots.load(
            [row.slot for _, row in rows],
            [s.slot_options(row) for s, row in rows],
            [s.sampled(row) for s, row in rows],
            [s.n_cached(row) for s, row in rows],
            self._rules.timestamp_begin,
        )

    def copy_kv(self, sequence: DecodeSequence, copies: Sequence[RowCopy]) -> None:
        page_tokens = self._self_layout.page_frames
        with self._on_device():
            for copy in copies:
                n_positions = sequence.n_cached(copy.target)
                sources, targets = copy.source.self_pages, copy.target.self_pages
                for source, target in zip(sources, targets, strict=True):
                    n = min(page_tokens, n_positions)
                    if n <= 0:
                        break
                    self._self_pool[target, :, :, :n] = self._self_pool[source, :, :, :n]
                    n_positions -= n

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with torch.inference_mode(), on_stream(self._stream):
            yield

    def _forward(
        self, sequences: Sequence[DecodeSequence], fed: Sequence[tuple[int, ...]]
    ) -> Tensor:
        """Feed each first row from position 0 on; returns states [n_tokens, n_text_state]."""
        counts = [len(tokens) for tokens in fed]
        rows = [(s, s.rows[0], n) for s, n in zip(sequences, counts, strict=True)]
        self._plan(rows, counts)
        flat = [token for tokens in fed for token in tokens]
        positions = [position for n in counts for position in range(n)]
        return self._decoder.states(self._indices(flat), self._indices(positions))

    def _plan(self, rows: Sequence[tuple[DecodeSequence, Row, int]], counts: Sequence[int]) -> None:
        """Plan a forward. rows: with their lengths after it. counts: new tokens of each row."""
        windows: dict[DecodeSequence, int] = {}  # query rows of each
        for (sequence, _, _), count in zip(rows, counts, strict=True):
            windows[sequence] = windows.get(sequence, 0) + count
        self._decoder.plan(
            AttentionBatch(
                self_kv=PagedKV.make(
                    counts,
                    [row.self_pages for _, row, _ in rows],
                    [length for _, _, length in rows],
                    self._self_layout.page_frames,
                ),
                cross_kv=PagedKV.make(
                    list(windows.values()),
                    [sequence.cross_pages for sequence in windows],
                    [sequence.n_positions for sequence in windows],
                    self._cross_layout.page_frames,
                ),
            )
        )

    def _sampling(self, sequences: Sequence[DecodeSequence]) -> tuple[Tensor, Tensor | None, int]:
        """`DecodeStep`'s arguments for the live rows: slots, rows with noise, and n_top."""
        rows = [(sequence, row) for sequence in sequences for row in sequence.live]
        noisy = [i for i, (sequence, _) in enumerate(rows) if sequence.temperature > 0]
        slots = self._indices([row.slot for _, row in rows])
        n_top = max(_n_top(sequence) for sequence in sequences)
        return slots, self._indices(noisy) if noisy else None, n_top

    def _indices(self, values: list[int]) -> Tensor:
        return upload(values, torch.int64, self._device)


def _nothing() -> None:
    """Nothing runs that could be interrupted."""


def _known_text(sequence: DecodeSequence, tokens: tuple[int, ...]) -> KnownText:
    return KnownText(
        cross_pages=sequence.cross_pages,
        self_pages=sequence.rows[0].self_pages,
        tokens=tokens,
        n_positions=sequence.n_positions,
        content_frames=sequence.request.content_frames,
        language=sequence.language or "",
        task=sequence.options.task,
        prompt=sequence.prompt.tokens,
    )


def text_to_align(sequence: DecodeSequence, tokenizer: WhisperTokenizer) -> tuple[int, ...]:
    """The text tokens of the window's segments, prefix included; empty for silence."""
    chosen = sequence.attempts[chosen_attempt(sequence)].hypothesis
    if is_silence(sequence.options.gates, chosen.avg_logprob, sequence.no_speech_prob):
        return ()
    special = tokenizer.special
    text = (*sequence.options.prefix_tokens, *chosen.tokens)
    pieces = split_tokens(text, special.timestamp_begin).pieces
    return tuple(token for piece in pieces for token in piece.tokens if token < special.eot)


def _goes_on_alone(sequence: DecodeSequence) -> bool:
    """Whether it decodes greedily in a single row, which needs no decision of the host."""
    is_greedy = sequence.runs_ahead and sequence.temperature == 0
    return is_greedy and not sequence.n_ahead and not _n_top(sequence)


def _n_top(sequence: DecodeSequence) -> int:
    assert sequence.search is not None
    return sequence.search.n_top

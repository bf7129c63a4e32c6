"""Runs the model over sequences: language detection, prompts, and single decode steps.

It builds each forward's rows and page tables, runs the decoder, and samples. Every call reads
sequences and changes none of them; it writes only their own self-attention pages and slots, so a
call that raised can be repeated with fewer sequences after `restore`. Knows nothing of queues,
deadlines or transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cluster.kv.layout import KVLayout
from cluster.kv.pool import PagePool
from cluster.messages import TokenAlignment
from cluster.model.checkpoint import Checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from cluster.model.weights import TORCH_DTYPES
from cluster.quality import is_silence
from cluster.splitting import split_tokens
from decoder_worker.alignment import Aligner, AlignmentItem
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.fallback import chosen_attempt
from decoder_worker.landing import Landing
from decoder_worker.logit_rules import LogitRules
from decoder_worker.model import TextDecoder
from decoder_worker.sampling import Sampled, Sampler, SamplingState, best_of
from decoder_worker.search import Row, RowCopy, StepOutput
from decoder_worker.sequence import DecodeSequence

MAX_INITIAL_TIMESTAMP = 50  # steps of 20 ms: openai/whisper's max_initial_timestamp of 1.0 s


def self_kv_layout(checkpoint: Checkpoint, dtype: str, page_tokens: int = 0) -> KVLayout:
    """Layout of one sequence's self-attention KV, for the longest text that it may have.

    page_tokens: positions in a page; 0 takes the whole text context, so that on a CPU attention
        reads a view without a gather.
    """
    dims = checkpoint.dims
    return KVLayout(
        model="self",
        n_layer=dims.n_text_layer,
        n_head=dims.n_text_head,
        head_dim=dims.text_head_dim,
        n_frames=dims.n_text_ctx,
        page_frames=page_tokens or dims.n_text_ctx,
        dtype=dtype,
    )


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that a row is fed in one forward, from position `start` on."""

    sequence: DecodeSequence
    row: Row
    tokens: tuple[int, ...]
    start: int


class ModelRunner:
    """Owns weights, self-attention pool and sampling state. For one thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: WhisperTokenizer,
        cross_pool: PagePool,
        self_pool: PagePool,
        n_slots: int,
    ) -> None:
        """The device is the pools', the dtype the self pool's."""
        self._tokenizer = tokenizer
        self._device = self_pool.device
        self._cross_layout, self._self_layout = cross_pool.layout, self_pool.layout
        self._self_pool = self_pool.tensor
        dtype = TORCH_DTYPES[self_pool.layout.dtype]
        self.model = TextDecoder.load(checkpoint, dtype, self._device)
        self.attention: AttentionBackend = TorchAttention(self_pool.tensor, cross_pool.tensor)
        listed = checkpoint.generation_config.get("max_initial_timestamp_index")
        limit = MAX_INITIAL_TIMESTAMP if listed is None else int(listed)
        self._state = SamplingState(n_slots, self._device)
        self._rules = LogitRules(tokenizer, limit, self._device)
        self._sample = Sampler(self._rules, self._state)
        self._aligner = Aligner(
            checkpoint, tokenizer, self.model, self.attention, cross_pool, self_pool
        )
        self.landing = Landing(checkpoint, cross_pool)
        self._language_tokens = torch.tensor(
            list(tokenizer.special.languages.values()), dtype=torch.int64, device=self._device
        )

    @torch.inference_mode()
    def detect_language(self, sequences: Sequence[DecodeSequence]) -> list[StepOutput]:
        """The likeliest language token after `<|startoftranscript|>` alone.

        Overwrites the first position of the sequences' self-attention KV.
        """
        fed = [Feed(s, s.rows[0], (self._tokenizer.special.sot,), 0) for s in sequences]
        best = best_of(self.model.logits(self._forward(fed)), self._language_tokens)
        return _outputs(best)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[DecodeSequence]) -> list[list[StepOutput]]:
        """Run the prompts of any lengths in one batch, each in its sequence's first live row.

        Every live row samples its first token from the same logits. What a search then wants
        copied (`copy_kv`) brings the prompt's KV to the other rows.
        """
        fed = [Feed(s, s.live[0], s.prompt.tokens, 0) for s in sequences]
        states = self._forward(fed)
        begins = list(accumulate((len(f.tokens) for f in fed), initial=0))
        sot_rows = [begin + s.prompt.sot for begin, s in zip(begins[:-1], sequences, strict=True)]
        at_sot = self.model.logits(states[sot_rows])
        no_speech = (at_sot[:, self._tokenizer.special.no_speech] - at_sot.logsumexp(-1)).exp()
        logits = self.model.logits(states[[end - 1 for end in begins[1:]]])
        repeats = [len(s.live) for s in sequences]
        if max(repeats) > 1:
            counts = self._indices(repeats)
            logits, no_speech = (
                logits.repeat_interleave(counts, 0),
                no_speech.repeat_interleave(counts),
            )
        for sequence in sequences:
            self.restore(sequence)
        return self._next(logits, sequences, no_speech)

    @torch.inference_mode()
    def decode(self, sequences: Sequence[DecodeSequence]) -> list[list[StepOutput]]:
        """One step: feed each live row's last token, sample the next; outputs by sequence."""
        fed = [
            Feed(s, row, (row.tokens[-1],), s.n_cached(row)) for s in sequences for row in s.live
        ]
        return self._next(self.model.logits(self._forward(fed)), sequences, None)

    def align(self, sequences: Sequence[DecodeSequence]) -> list[TokenAlignment | None]:
        """When the tokens of decoded sequences are spoken; None where there is nothing to align.

        Overwrites the self-attention KV of each one's first row.
        """
        texts = [(s, text_to_align(s, self._tokenizer)) for s in sequences]
        items = [
            AlignmentItem(
                cross_pages=s.cross_pages,
                self_pages=s.rows[0].self_pages,
                language=s.language or "",
                task=s.options.task,
                tokens=text,
                content_frames=s.request.content_frames,
            )
            for s, text in texts
            if text
        ]
        found = iter(self._aligner.align(items) if items else [])
        return [next(found) if text else None for _, text in texts]

    def restore(self, sequence: DecodeSequence) -> None:
        """Set the slots of the live rows from what these have sampled so far."""
        for row in sequence.live:
            options = sequence.slot_options(row)
            self._state.load(row.slot, options, row.tokens, self._rules.timestamp_begin)

    @torch.inference_mode()
    def copy_kv(self, sequence: DecodeSequence, copies: Sequence[RowCopy]) -> None:
        """Bring rows' self-attention KV, up to their last cached position, to other rows."""
        page_tokens = self._self_layout.page_frames
        for copy in copies:
            n_positions = sequence.n_cached(copy.target)
            sources, targets = copy.source.self_pages, copy.target.self_pages
            for source, target in zip(sources, targets, strict=True):
                n = min(page_tokens, n_positions)
                if n <= 0:
                    break
                self._self_pool[target, :, :, :n] = self._self_pool[source, :, :, :n]
                n_positions -= n

    def _forward(self, fed: Sequence[Feed]) -> Tensor:
        """Run the rows' tokens; states [n_tokens, state]. Rows of a sequence stand together."""
        counts = [len(feed.tokens) for feed in fed]
        lengths = [feed.start + n for feed, n in zip(fed, counts, strict=True)]
        windows: dict[DecodeSequence, int] = {}  # query rows of each, which read its pages once
        for feed, count in zip(fed, counts, strict=True):
            windows[feed.sequence] = windows.get(feed.sequence, 0) + count
        n_frames = self._cross_layout.n_frames
        self.attention.plan(
            AttentionBatch(
                self_kv=PagedKV.make(
                    counts,
                    [feed.row.self_pages for feed in fed],
                    lengths,
                    self._self_layout.page_frames,
                ),
                cross_kv=PagedKV.make(
                    list(windows.values()),
                    [sequence.cross_pages for sequence in windows],
                    [n_frames] * len(windows),
                    self._cross_layout.page_frames,
                ),
            )
        )
        flat = [token for feed in fed for token in feed.tokens]
        spans = zip(fed, lengths, strict=True)
        positions = [position for feed, end in spans for position in range(feed.start, end)]
        return self.model(self._indices(flat), self._indices(positions), self.attention)

    def _next(
        self, logits: Tensor, sequences: Sequence[DecodeSequence], no_speech: Tensor | None
    ) -> list[list[StepOutput]]:
        """Sample for every live row; logits float32 [n_rows, n_vocab]."""
        rows = [(sequence, row) for sequence in sequences for row in sequence.live]
        noisy = [i for i, (sequence, _) in enumerate(rows) if sequence.temperature > 0]
        n_top = max(_n_top(sequence) for sequence in sequences)
        sampled = self._sample(
            logits,
            self._indices([row.slot for _, row in rows]),
            self._indices(noisy) if noisy else None,
            n_top,
        )
        outputs = iter(_outputs(sampled, no_speech))
        return [[next(outputs) for _ in sequence.live] for sequence in sequences]

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def text_to_align(sequence: DecodeSequence, tokenizer: WhisperTokenizer) -> tuple[int, ...]:
    """The text tokens of the segments that the window will have; none for silence."""
    chosen = sequence.attempts[chosen_attempt(sequence)].hypothesis
    if is_silence(sequence.options.gates, chosen.avg_logprob, sequence.no_speech_prob):
        return ()
    special = tokenizer.special
    pieces = split_tokens(chosen.tokens, special.timestamp_begin).pieces
    return tuple(token for piece in pieces for token in piece.tokens if token < special.eot)


def _n_top(sequence: DecodeSequence) -> int:
    assert sequence.search is not None
    return sequence.search.n_top


def _outputs(sampled: Sampled, no_speech: Tensor | None = None) -> list[StepOutput]:
    """The only place that reads a step's results back to the host."""
    tokens, logprobs = sampled.tokens.tolist(), sampled.logprobs.tolist()
    probs = [0.0] * len(tokens) if no_speech is None else no_speech.tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(tokens)
    if sampled.top_tokens is not None and sampled.top_logprobs is not None:
        pairs = zip(sampled.top_tokens.tolist(), sampled.top_logprobs.tolist(), strict=True)
        tops = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
    columns = zip(tokens, logprobs, probs, tops, strict=True)
    return [StepOutput(*column) for column in columns]

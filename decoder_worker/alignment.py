"""Finds when the tokens of a known text are spoken, and where the decoder attended for each.

Times are found as in openai/whisper's `timing.py`, from one forward over the text. A token's peak
is the position of its highest averaged cross-attention (AlignAtt: Papi et al., Interspeech 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from cluster.common.errors import CheckpointError, SequenceFailedError
from cluster.common.kv.cross_kv import packed_page
from cluster.common.kv.pool import PagePool
from cluster.common.messages import WINDOW_S, Task, TokenAlignment
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.encoder_context import MEL_PER_POSITION
from cluster.common.model.streams import upload
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.cpu.compiled import path_finder
from decoder_worker.model import TextDecoder, TorchDecoder
from decoder_worker.step import Readback


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownText:
    """One window whose text is known.

    cross_pages: hold its KV, of `n_positions` encoder positions. self_pages: room for the text,
        overwritten; for peaks they hold the KV of the prompt except its last token.
    tokens: at least one; for alignment they fit into the text context with start and end.
    """

    cross_pages: Sequence[int]
    self_pages: Sequence[int]
    tokens: tuple[int, ...]
    n_positions: int
    content_frames: int  # mel frames that are audio and not padding
    language: str
    task: Task
    prompt: tuple[int, ...] = ()  # the tokens before the text


class QueryTap:
    """An `AttentionBackend` that wraps another one and keeps the cross queries of some heads.

    heads: layer -> int64 [n]. queries: layer -> float32 [n, n_tokens, head_dim], set by a forward.
    """

    def __init__(self, attention: AttentionBackend, heads: Mapping[int, Tensor]) -> None:
        self._attention = attention
        self._heads = heads
        self.queries: dict[int, Tensor] = {}

    def plan(self, batch: AttentionBatch) -> None:
        self._attention.plan(batch)

    def begin(self, positions: Tensor) -> None:
        self._attention.begin(positions)

    def self_attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._attention.self_attention(layer, q, k, v)

    def cross_attention(self, layer: int, q: Tensor) -> Tensor:
        if layer in self._heads:
            self.queries[layer] = q.index_select(1, self._heads[layer]).transpose(0, 1).float()
        return self._attention.cross_attention(layer, q)


def alignment_heads(checkpoint: Checkpoint) -> dict[int, list[int]]:
    """Layer -> heads that the checkpoint lists (or CheckpointError), else all of the upper half."""
    dims = checkpoint.dims
    listed = checkpoint.generation_config.get("alignment_heads")
    if not listed:
        upper = range(dims.n_text_layer // 2, dims.n_text_layer)
        return {layer: list(range(dims.n_text_head)) for layer in upper}
    heads: dict[int, list[int]] = {}
    for layer, head in sorted({(int(layer), int(head)) for layer, head in listed}):
        if not (0 <= layer < dims.n_text_layer and 0 <= head < dims.n_text_head):
            raise CheckpointError(
                f"{checkpoint.path}: generation_config.json names alignment head {head} of layer "
                f"{layer}, but the decoder has {dims.n_text_layer} layers of {dims.n_text_head}"
            )
        heads.setdefault(layer, []).append(head)
    return heads


class PendingAlignment:
    """The outcome of a text's forward, from which `find` computes the times."""

    def __init__(
        self, tokens: tuple[int, ...], look: Callable[[], Tensor], probs: Tensor, rate: float
    ) -> None:
        """look: makes float32 [n_tokens, n_frames] of the window's pages. rate: frames a second."""
        self._tokens = tokens
        self._look = look
        self._probs = probs
        self._rate = rate
        self._readback = None if probs.device.type == "cpu" else Readback([look(), probs])

    @torch.inference_mode()
    def find(self) -> TokenAlignment:
        """Compute the times, on any thread, while the window's pages are held.

        Raises SequenceFailedError if the model gave no numbers.
        """
        readback = self._readback or Readback([self._look(), self._probs])
        look, probs = cast("list[Tensor]", readback.wait())
        known = tuple(probs.tolist())
        matrix = look.numpy()
        if not np.isfinite(matrix).all() or not all(isfinite(prob) for prob in known):
            raise SequenceFailedError("the text could not be aligned: the model gave no numbers")
        firsts = path_finder()(-matrix)
        times_s = tuple(frame / self._rate for frame in firsts.tolist())
        return TokenAlignment(self._tokens, times_s, known)


class Aligner:
    """Aligns known texts over a decoder's pools. For the thread that runs the decoder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: WhisperTokenizer,
        decoder: TextDecoder,
        layers: TorchDecoder,
        cross_pool: PagePool,
        self_pool: PagePool,
    ) -> None:
        """decoder: computes the logits. layers: the reference, whose cross queries are kept."""
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._rate = checkpoint.dims.n_audio_ctx / WINDOW_S
        self._page_sizes = (self_pool.layout.page_frames, cross_pool.layout.page_frames)
        self._layers = layers
        self._cross_pool = cross_pool
        self._device = cross_pool.device
        named = alignment_heads(checkpoint)
        self._heads = {layer: self._indices(heads) for layer, heads in named.items()}
        self._n_heads = sum(len(heads) for heads in named.values())

    @torch.inference_mode()
    def align(self, items: Sequence[KnownText]) -> list[PendingAlignment]:
        """Launch the alignment of all items, independently. Overwrites their self pages."""
        starts = [self._tokenizer.sot_sequence(i.language, i.task, False) for i in items]
        eot = self._tokenizer.special.eot
        texts = [(*s, *item.tokens, eot) for s, item in zip(starts, items, strict=True)]
        counts = [len(text) for text in texts]
        states, found = self._forward(items, texts, [0] * len(items))
        begins = accumulate(counts, initial=0)
        pending = []
        for item, start, queries, begin, n in zip(
            items, starts, found, list(begins)[:-1], counts, strict=True
        ):
            n_sot = len(start) - 1  # without <|notimestamps|>, whose row predicts the first token
            look = partial(self._looks, item, queries, n_sot)
            probs = self._probs(states[begin + n_sot : begin + n - 2], item.tokens)
            pending.append(PendingAlignment(item.tokens, look, probs, self._rate))
        return pending

    def _looks(self, item: KnownText, queries: Mapping[int, Tensor], n_sot: int) -> Tensor:
        """Mean of all heads' sharpened weights over the audio: float32 [n_tokens, n_frames]."""
        n_frames = min(max(1, item.content_frames // MEL_PER_POSITION), item.n_positions)
        total = None
        for layer, q in queries.items():
            weights = self._weights(layer, q, item.cross_pages, n_frames, item.n_positions)
            sharp = median_filter(standardise(weights)).sum(0)
            total = sharp if total is None else total + sharp
        assert total is not None
        return (total / self._n_heads)[n_sot:-1]

    def _probs(self, states: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Probability of each token among text tokens, from the state before it: float32 [n]."""
        logits = self._decoder.logits(states)[:, : self._tokenizer.special.eot]
        chosen = logits.gather(1, self._indices(tokens)[:, None])[:, 0]
        return (chosen - logits.logsumexp(-1)).exp()

    @torch.inference_mode()
    def peaks(self, items: Sequence[KnownText]) -> list[tuple[int, ...]]:
        """Each token's peak, an encoder position; SequenceFailedError if any item has none."""
        # The tokens that predict the text: the prompt's last one, and all of the text but its last.
        fed = [(item.prompt[-1], *item.tokens[:-1]) for item in items]
        starts = [len(item.prompt) - 1 for item in items]
        _, queries = self._forward(items, fed, starts)
        return [self._peaks_of(item, own) for item, own in zip(items, queries, strict=True)]

    def _peaks_of(self, item: KnownText, queries: Mapping[int, Tensor]) -> tuple[int, ...]:
        n = item.n_positions
        looks = [
            self._weights(layer, q, item.cross_pages, n, n).sum(0) for layer, q in queries.items()
        ]
        total = torch.stack(looks).sum(0)  # [n_tokens, n_positions]
        if not torch.isfinite(total).all():
            raise SequenceFailedError("the text has no peaks: the model gave no numbers")
        return tuple(total.argmax(-1).tolist())

    def _forward(
        self, items: Sequence[KnownText], texts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> tuple[Tensor, list[Mapping[int, Tensor]]]:
        """Feed each item's text from its start position on; writes its self-attention KV.

        Returns the states of all texts [n_tokens, n_text_state], and for each item layer ->
        queries, float32 [n, its tokens, head_dim].
        """
        counts = [len(text) for text in texts]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        spans = zip(starts, ends, strict=True)
        own_size, cross_size = self._page_sizes
        lengths, pages = [i.n_positions for i in items], [i.cross_pages for i in items]
        batch = AttentionBatch(
            self_kv=PagedKV.make(counts, [i.self_pages for i in items], ends, own_size),
            cross_kv=PagedKV.make(counts, pages, lengths, cross_size),
        )
        tap = QueryTap(self._layers.attention, self._heads)
        decoder = self._layers.over(tap)
        decoder.plan(batch)
        states = decoder.states(
            self._indices([token for text in texts for token in text]),
            self._indices([position for span in spans for position in range(*span)]),
        )
        begins = accumulate(counts, initial=0)
        return states, [
            {layer: q[:, begin:end] for layer, q in tap.queries.items()}
            for begin, end in pairwise(begins)
        ]

    def _weights(
        self, layer: int, queries: Tensor, pages: Sequence[int], n_frames: int, n_positions: int
    ) -> Tensor:
        """Weights of queries [n, n_tokens, head_dim] on frames: float32 [n, n_tokens, n_frames]."""
        keys = self._keys(layer, pages, n_frames, n_positions)
        weights: Tensor = (queries @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5).softmax(-1)
        return weights

    def _keys(self, layer: int, pages: Sequence[int], n_frames: int, n_positions: int) -> Tensor:
        """Copy the heads' keys out of the pages: float32 [n, n_frames, head_dim]."""
        if self._cross_pool.packs:
            page = packed_page(self._cross_pool.tensor[pages[0]], n_positions)
            keys = page[layer, 0, :n_frames].index_select(1, self._heads[layer])
            return keys.transpose(0, 1).float()
        n_pages = self._cross_pool.layout.pages_for(n_frames)
        own = self._indices(list(pages[:n_pages]))
        keys = self._cross_pool.tensor[:, layer, 0]  # [page, page_frames, head, head_dim]
        chosen = keys[own[:, None], :, self._heads[layer]]  # [n_pages, n, page_frames, head_dim]
        return chosen.transpose(0, 1).flatten(1, 2)[:, :n_frames].float()

    def _indices(self, values: Sequence[int]) -> Tensor:
        return upload(values, torch.int64, self._device)


MEDIAN_WIDTH = 7  # frames, 140 ms

# Exchanges that bring the median of seven to the middle: Devillard, "Fast median search", 1998.
# fmt: off
_MEDIAN_NETWORK = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6),
    (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)
# fmt: on


def standardise(weights: Tensor) -> Tensor:
    """Standardise [heads, tokens, frames] over tokens; equal ones give 0 (openai/whisper: NaN)."""
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    scaled = (weights - mean) / std
    return torch.where(std == 0, torch.zeros_like(scaled), scaled)


def median_filter(x: Tensor) -> Tensor:
    """Running median over the frames of x [heads, tokens, frames], mirrored at both ends."""
    reach = MEDIAN_WIDTH // 2
    n_frames = x.shape[-1]
    if n_frames <= reach:
        return x
    padded = F.pad(x, (reach, reach), mode="reflect")
    lanes = [padded[..., shift : shift + n_frames] for shift in range(MEDIAN_WIDTH)]
    for low, high in _MEDIAN_NETWORK:
        a, b = lanes[low], lanes[high]
        lanes[low], lanes[high] = torch.minimum(a, b), torch.maximum(a, b)
    return lanes[reach]

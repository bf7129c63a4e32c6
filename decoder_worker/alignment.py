"""When each token of a finished text is spoken (openai/whisper, `timing.py`).

One teacher-forced pass over the text, with the window's cross-attention KV still in its pages:
where the alignment heads look is sharpened into one token-by-frame matrix, and dynamic time
warping finds the best monotonic path through it. Owns no page; knows nothing of words, segments
or queues: which tokens are text, and what they make together, is its callers' business.

What raised for a batch may be called again for each of its items alone: it changes nothing but
the items' own self-attention pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from cluster.errors import CheckpointError, SequenceFailedError
from cluster.kv.pool import PagePool
from cluster.messages import WINDOW_S, Task, TokenAlignment
from cluster.model.checkpoint import Checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.model import TextDecoder, TorchDecoder

MEDIAN_WIDTH = 7  # frames, 140 ms

# Exchanges that bring the median of seven to the middle: Devillard, "Fast median search", 1998.
# fmt: off
_MEDIAN_NETWORK = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6),
    (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)
# fmt: on


@dataclass(frozen=True, slots=True)
class AlignmentItem:
    """One window whose text is known.

    cross_pages: hold its KV. self_pages: room for the text, overwritten.
    tokens: text tokens in order; with start sequence and end they must fit the text context.
    content_frames: mel frames that are audio and not padding.
    """

    cross_pages: Sequence[int]
    self_pages: Sequence[int]
    language: str
    task: Task
    tokens: tuple[int, ...]
    content_frames: int


class QueryTap:
    """Implements `AttentionBackend` by another one, and keeps some heads' cross queries.

    heads: layer -> int64 [n] heads; queries: layer -> float32 [n, n_tokens, head_dim], filled by
        a forward.
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


class Aligner:
    """Aligns texts with the KV in a decoder's pools. For the thread that runs the decoder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: WhisperTokenizer,
        decoder: TextDecoder,
        layers: TorchDecoder,
        cross_pool: PagePool,
        self_pool: PagePool,
    ) -> None:
        """
        Args:
            decoder: over these two pools; gives the logits.
            layers: over these two pools; gives states, whose queries are kept on the way.

        Raises:
            CheckpointError: the checkpoint names alignment heads that it does not have.
        """
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._layers = layers
        self._cross_pool, self._self_pool = cross_pool, self_pool
        self._dims = checkpoint.dims
        self._device = self_pool.device
        self._heads = {
            layer: self._indices(heads) for layer, heads in alignment_heads(checkpoint).items()
        }

    @torch.inference_mode()
    def align(self, items: Sequence[AlignmentItem]) -> list[TokenAlignment]:
        """The alignment of each item, whatever else is in the batch. Overwrites their self pages.

        Raises:
            SequenceFailedError: an item's KV or text gave no numbers; which one, only a call with
                each of them alone tells.
        """
        starts = [self._tokenizer.sot_sequence(i.language, i.task, False) for i in items]
        eot = self._tokenizer.special.eot
        texts = [(*s, *item.tokens, eot) for s, item in zip(starts, items, strict=True)]
        counts = [len(text) for text in texts]
        tap = QueryTap(self._layers.attention, self._heads)
        states = self._forward(items, texts, tap)
        begins = list(accumulate(counts, initial=0))
        looks, probs = [], []
        for item, start, begin, n in zip(items, starts, begins[:-1], counts, strict=True):
            queries = {layer: q[:, begin : begin + n] for layer, q in tap.queries.items()}
            n_sot = len(start) - 1  # without <|notimestamps|>, whose row predicts the first token
            looks.append(self._looks(item, queries)[n_sot:-1])
            probs.append(self._probs(states[begin + n_sot : begin + n - 2], item.tokens))
        return [
            self._alignment(item.tokens, look, prob)
            for item, look, prob in zip(items, looks, probs, strict=True)
        ]

    def _forward(
        self, items: Sequence[AlignmentItem], texts: Sequence[tuple[int, ...]], tap: QueryTap
    ) -> Tensor:
        """Feed all texts from position 0 on; states [n_tokens, n_text_state]."""
        counts = [len(text) for text in texts]
        n_frames = [self._dims.n_audio_ctx] * len(items)
        own, cross = [item.self_pages for item in items], [item.cross_pages for item in items]
        own_size = self._self_pool.layout.page_frames
        cross_size = self._cross_pool.layout.page_frames
        decoder = self._layers.over(tap)
        decoder.plan(
            AttentionBatch(
                self_kv=PagedKV.make(counts, own, counts, own_size),
                cross_kv=PagedKV.make(counts, cross, n_frames, cross_size),
            )
        )
        tokens = self._indices([token for text in texts for token in text])
        positions = self._indices([position for n in counts for position in range(n)])
        return decoder.states(tokens, positions)

    def _looks(self, item: AlignmentItem, queries: Mapping[int, Tensor]) -> Tensor:
        """How much each token of an item looks at each frame of its audio.

        Returns:
            float32 [n_tokens, n_frames], the mean over the alignment heads.
        """
        n_frames = self._n_frames(item.content_frames)
        total = None
        for layer, q in queries.items():
            keys = self._keys(item.cross_pages, layer, n_frames)
            weights = (q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
            sharp = median_filter(standardise(weights)).sum(0)
            total = sharp if total is None else total + sharp
        assert total is not None
        return total / sum(len(heads) for heads in self._heads.values())

    def _n_frames(self, content_frames: int) -> int:
        """Encoder frames of the audio: a mel frame alone still has one to look at."""
        n_mel_per_frame = self._dims.n_mel_frames // self._dims.n_audio_ctx
        return min(max(1, content_frames // n_mel_per_frame), self._dims.n_audio_ctx)

    def _keys(self, pages: Sequence[int], layer: int, n_frames: int) -> Tensor:
        """The alignment heads' keys, copied out of the pages: float32 [n, n_frames, head_dim]."""
        layout = self._cross_pool.layout
        own = self._indices(list(pages[: layout.pages_for(n_frames)]))
        keys = self._cross_pool.tensor[:, layer, 0]  # [page, page_frames, head, head_dim]
        chosen = keys[own[:, None], :, self._heads[layer]]  # [n_pages, n, page_frames, head_dim]
        return chosen.transpose(0, 1).flatten(1, 2)[:, :n_frames].float()

    def _probs(self, states: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Of each token, among all text, after the state before it: float32 [len(tokens)]."""
        logits = self._decoder.logits(states)[:, : self._tokenizer.special.eot]
        chosen = logits.gather(1, self._indices(list(tokens))[:, None])[:, 0]
        return (chosen - logits.logsumexp(-1)).exp()

    def _alignment(self, tokens: tuple[int, ...], look: Tensor, probs: Tensor) -> TokenAlignment:
        known = tuple(probs.tolist())
        matrix = look.cpu().numpy()
        if not np.isfinite(matrix).all() or not all(isfinite(prob) for prob in known):
            raise SequenceFailedError("the text could not be aligned: the model gave no numbers")
        frames_per_s = self._dims.n_audio_ctx / WINDOW_S
        times_s = tuple(frame / frames_per_s for frame in first_columns(-matrix))
        return TokenAlignment(tokens, times_s, known)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def alignment_heads(checkpoint: Checkpoint) -> dict[int, list[int]]:
    """Layer to heads: those that the checkpoint names, else all of the upper half's layers.

    Raises:
        CheckpointError: a head that is named does not exist.
    """
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


def standardise(weights: Tensor) -> Tensor:
    """Each frame's weights [heads, tokens, frames] against those of the other tokens.

    A frame at which all tokens look alike says nothing: 0, where openai/whisper has NaN.
    """
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    scaled = (weights - mean) / std
    return torch.where(std == 0, torch.zeros_like(scaled), scaled)


def median_filter(x: Tensor) -> Tensor:
    """Running median over frames, mirrored at both ends; x [heads, tokens, frames] float.

    Too few frames to mirror are left alone. An exchange network takes a sixth of a sort's time.
    """
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


def first_columns(x: NDArray[np.float32]) -> list[int]:
    """Dynamic time warping: where the cheapest path through x [n, m] enters each of its rows.

    Costs are summed anti-diagonal by anti-diagonal, for then a diagonal is one vector operation:
    1724 of them for 225 rows of 1500 columns. Steps and ties are openai/whisper's: straight or
    down only if strictly cheapest of the three, else along the row, even where that is dearer.
    """
    n, m = x.shape
    skewed = np.zeros((n + m - 1, n), dtype=np.float32)  # [i + j, i]
    for i, row in enumerate(x):
        skewed[i : i + m, i] = row
    cost = np.full((n + m + 1, n + 1), np.inf, dtype=np.float32)  # [i + j, i], both from 1
    cost[0, 0] = 0.0
    least = np.empty(n, dtype=np.float32)
    is_least, differs = np.empty(n, dtype=np.bool_), np.empty(n, dtype=np.bool_)
    for diagonal in range(2, n + m + 1):
        straight, down = cost[diagonal - 2, :-1], cost[diagonal - 1, :-1]
        along, out = cost[diagonal - 1, 1:], cost[diagonal, 1:]
        np.minimum(straight, down, out=least)
        np.less(least, along, out=is_least)
        np.not_equal(straight, down, out=differs)
        np.logical_and(is_least, differs, out=is_least)
        out[:] = along
        np.copyto(out, least, where=is_least)
        np.add(out, skewed[diagonal - 2], out=out)
    return _trace_back(cost, n, m)


def _trace_back(cost: NDArray[np.float32], n: int, m: int) -> list[int]:
    """First column of each row on the path that ends at (n, m); cost is [i + j, i]."""
    firsts = [0] * n
    i, j = n, m
    while i > 0 and j > 0:
        firsts[i - 1] = j - 1
        straight, down = cost[i + j - 2, i - 1], cost[i + j - 1, i - 1]
        along = cost[i + j - 1, i]
        if straight < min(down, along):
            i, j = i - 1, j - 1
        elif down < min(straight, along):
            i -= 1
        else:
            j -= 1
    return firsts

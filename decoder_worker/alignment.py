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
from torch import Tensor

from cluster.errors import CheckpointError, SequenceFailedError
from cluster.kv.pool import PagePool
from cluster.messages import WINDOW_S, Task, TokenAlignment
from cluster.model.checkpoint import Checkpoint
from cluster.model.cross_kv import packed_page
from cluster.model.encoder_context import MEL_PER_POSITION
from cluster.model.tokenizer import WhisperTokenizer
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.model import TextDecoder, TorchDecoder
from decoder_worker.time_warping import first_columns, median_filter, standardise


@dataclass(frozen=True, slots=True)
class AlignmentItem:
    """One window whose text is known.

    cross_pages: hold its KV. self_pages: room for the text, overwritten.
    tokens: text tokens in order; with start sequence and end they must fit the text context.
    content_frames: mel frames that are audio and not padding.
    n_positions: encoder positions whose KV there is.
    """

    cross_pages: Sequence[int]
    self_pages: Sequence[int]
    language: str
    task: Task
    tokens: tuple[int, ...]
    content_frames: int
    n_positions: int


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
            SequenceFailedError: an item's KV or text gave no numbers. To find out which one, call
                this for each of them alone.
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
        n_frames = [item.n_positions for item in items]
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
        n_frames = self._n_frames(item)
        total = None
        for layer, q in queries.items():
            keys = self._keys(item, layer, n_frames)
            weights = (q @ keys.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
            sharp = median_filter(standardise(weights)).sum(0)
            total = sharp if total is None else total + sharp
        assert total is not None
        return total / sum(len(heads) for heads in self._heads.values())

    def _n_frames(self, item: AlignmentItem) -> int:
        """Encoder frames of the audio: a mel frame alone still has one to look at."""
        return min(max(1, item.content_frames // MEL_PER_POSITION), item.n_positions)

    def _keys(self, item: AlignmentItem, layer: int, n_frames: int) -> Tensor:
        """The alignment heads' keys, copied out of the pages: float32 [n, n_frames, head_dim]."""
        if self._cross_pool.packs:
            page = packed_page(self._cross_pool.tensor[item.cross_pages[0]], item.n_positions)
            keys = page[layer, 0, :n_frames].index_select(1, self._heads[layer])
            return keys.transpose(0, 1).float()
        n_pages = self._cross_pool.layout.pages_for(n_frames)
        own = self._indices(list(item.cross_pages[:n_pages]))
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

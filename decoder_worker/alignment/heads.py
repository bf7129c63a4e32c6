"""Where a decoder's alignment heads look, and where they looked most as they predicted each token.

A forward of known tokens through the decoder's layers gives their cross-attention queries on its
way; the keys of the window are in its pages already. The peak of a token is the maximum of their
averaged cross-attention. Live transcription holds back what was predicted from the audio's very end
(AlignAtt: Papi et al., "AlignAtt: Using Attention-based Audio-Translation Alignments as a Guide for
Simultaneous Speech Translation", Interspeech 2023). Knows nothing of words and times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cluster.common.errors import CheckpointError, SequenceFailedError
from cluster.common.kv.cross_kv import packed_page
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import Checkpoint
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.model import TorchDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownText:
    """One window whose text is known.

    cross_pages: hold its KV, of `n_positions` encoder positions. self_pages: room for the text,
        overwritten. tokens: the text's, at least one.
    """

    cross_pages: Sequence[int]
    self_pages: Sequence[int]
    tokens: tuple[int, ...]
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


class AlignmentHeads:
    """The alignment heads of one checkpoint over a decoder's pools."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: TorchDecoder,
        cross_pool: PagePool,
        self_pool: PagePool,
    ) -> None:
        """layers: over these pools. Raises as `alignment_heads`."""
        self._page_sizes = (self_pool.layout.page_frames, cross_pool.layout.page_frames)
        self._layers = layers
        self._cross_pool = cross_pool
        self._device = cross_pool.device
        named = alignment_heads(checkpoint)
        self._heads = {layer: self._indices(heads) for layer, heads in named.items()}
        self.n_heads = sum(len(heads) for heads in named.values())

    def forward(
        self, items: Sequence[KnownText], texts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> tuple[Tensor, list[Mapping[int, Tensor]]]:
        """Feed each item's text from its position on; writes its self-attention KV.

        States of all texts [n_tokens, n_text_state], and of each item layer -> queries, float32
        [n, its tokens, head_dim].
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

    def weights(
        self, layer: int, queries: Tensor, pages: Sequence[int], n_frames: int, n_positions: int
    ) -> Tensor:
        """How much each query looks at each of the first frames: float32 [n, n_tokens, n_frames].

        queries: float32 [n, n_tokens, head_dim], of the layer's heads. pages: hold the window's KV,
        of `n_positions` encoder positions.
        """
        keys = self._keys(layer, pages, n_frames, n_positions)
        weights: Tensor = (queries @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5).softmax(-1)
        return weights

    def _keys(self, layer: int, pages: Sequence[int], n_frames: int, n_positions: int) -> Tensor:
        """The heads' keys, copied out of the pages: float32 [n, n_frames, head_dim]."""
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
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def alignment_heads(checkpoint: Checkpoint) -> dict[int, list[int]]:
    """Layer to heads: those that the checkpoint names, else all of the upper half's layers.

    Raises CheckpointError where a head that is named does not exist.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakItem(KnownText):
    """self_pages: hold the KV of the prompt without its last token.

    prompt: the tokens before the text.
    """

    prompt: tuple[int, ...]


class PeakFinder:
    """Finds the peaks of texts over a decoder's pools. For the thread that runs the decoder."""

    def __init__(self, heads: AlignmentHeads) -> None:
        self._heads = heads

    @torch.inference_mode()
    def find(self, items: Sequence[PeakItem]) -> list[tuple[int, ...]]:
        """For each of an item's tokens the encoder position of its peak, below `n_positions`.

        Raises SequenceFailedError where an item gave no numbers; call it again for each alone.
        """
        # What predicted a text: the prompt's last token, and all of the text but its last.
        fed = [(item.prompt[-1], *item.tokens[:-1]) for item in items]
        starts = [len(item.prompt) - 1 for item in items]
        _, queries = self._heads.forward(items, fed, starts)
        return [self._peaks(item, own) for item, own in zip(items, queries, strict=True)]

    def _peaks(self, item: PeakItem, queries: Mapping[int, Tensor]) -> tuple[int, ...]:
        n = item.n_positions
        looks = [
            self._heads.weights(layer, q, item.cross_pages, n, n).sum(0)
            for layer, q in queries.items()
        ]
        total = torch.stack(looks).sum(0)  # [n_tokens, n_positions]
        if not torch.isfinite(total).all():
            raise SequenceFailedError("the text has no peaks: the model gave no numbers")
        return tuple(total.argmax(-1).tolist())

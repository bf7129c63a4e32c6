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
from itertools import accumulate

import torch
from torch import Tensor

from cluster.common.errors import CheckpointError, SequenceFailedError
from cluster.common.kv.cross_kv import packed_page
from cluster.common.kv.pool import PagePool
from cluster.common.model.checkpoint import Checkpoint
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.model import TorchDecoder


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

    def __init__(self, checkpoint: Checkpoint, layers: TorchDecoder, cross_pool: PagePool) -> None:
        """layers: over this pool. Raises as `alignment_heads`."""
        self._layers = layers
        self._cross_pool = cross_pool
        self._device = cross_pool.device
        named = alignment_heads(checkpoint)
        self._heads = {layer: self._indices(heads) for layer, heads in named.items()}
        self.n_heads = sum(len(heads) for heads in named.values())

    def forward(
        self, batch: AttentionBatch, tokens: Sequence[int], positions: Sequence[int]
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Feed tokens to the planned rows; writes their self-attention KV.

        States [n_tokens, n_text_state], and layer -> queries, float32 [n, n_tokens, head_dim].
        """
        tap = QueryTap(self._layers.attention, self._heads)
        decoder = self._layers.over(tap)
        decoder.plan(batch)
        states = decoder.states(self._indices(tokens), self._indices(positions))
        return states, tap.queries

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


@dataclass(frozen=True, slots=True)
class PeakItem:
    """One window whose text is known.

    cross_pages: hold its KV, of `n_positions` encoder positions. self_pages: hold the KV of the
        prompt without its last token; what they have for later tokens is overwritten.
    prompt: the tokens before the text. tokens: the text's, at least one.
    """

    cross_pages: Sequence[int]
    self_pages: Sequence[int]
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    n_positions: int

    @property
    def fed(self) -> tuple[int, ...]:
        """What predicted `tokens`: the prompt's last token, and all of the text but its last."""
        return (self.prompt[-1], *self.tokens[:-1])


class PeakFinder:
    """Finds the peaks of texts over a decoder's pools. For the thread that runs the decoder."""

    def __init__(self, heads: AlignmentHeads, cross_pool: PagePool, self_pool: PagePool) -> None:
        self._heads = heads
        self._page_sizes = (self_pool.layout.page_frames, cross_pool.layout.page_frames)

    @torch.inference_mode()
    def find(self, items: Sequence[PeakItem]) -> list[tuple[int, ...]]:
        """For each of an item's tokens the encoder position of its peak, below `n_positions`.

        Raises SequenceFailedError where an item gave no numbers; call it again for each alone.
        """
        queries = self._forward(items)
        begins = list(accumulate((len(item.fed) for item in items), initial=0))
        return [
            self._peaks(item, {layer: q[:, begin:end] for layer, q in queries.items()})
            for item, begin, end in zip(items, begins[:-1], begins[1:], strict=True)
        ]

    def _forward(self, items: Sequence[PeakItem]) -> Mapping[int, Tensor]:
        """The queries of all fed tokens, one item after the other."""
        counts = [len(item.fed) for item in items]
        starts = [len(item.prompt) - 1 for item in items]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        own_size, cross_size = self._page_sizes
        positions = (range(start, end) for start, end in zip(starts, ends, strict=True))
        _, queries = self._heads.forward(
            AttentionBatch(
                self_kv=PagedKV.make(counts, [item.self_pages for item in items], ends, own_size),
                cross_kv=PagedKV.make(
                    counts,
                    [item.cross_pages for item in items],
                    [item.n_positions for item in items],
                    cross_size,
                ),
            ),
            [token for item in items for token in item.fed],
            [position for each in positions for position in each],
        )
        return queries

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

"""Where in the audio a decoder looked most when it predicted each token of a text.

One more forward over the text alone, behind the prompt whose self-attention KV is still in the
sequence's pages, gives the alignment heads' queries; their cross-attention is averaged, and its
maximum is the peak. Live transcription holds back what was predicted from the audio's very end
(AlignAtt: Papi et al., "AlignAtt: Using Attention-based Audio-Translation Alignments as a Guide for
Simultaneous Speech Translation", Interspeech 2023). Owns no page; knows nothing of words and times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cluster.common.errors import SequenceFailedError
from cluster.common.kv.pool import PagePool
from decoder_worker.alignment.heads import AlignmentHeads
from decoder_worker.attention.base import AttentionBatch, PagedKV


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

        After an error in a batch it may be called again for each item alone.

        Raises:
            SequenceFailedError: an item's KV or text gave no numbers.
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

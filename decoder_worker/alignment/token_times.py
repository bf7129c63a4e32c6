"""When each token of a finished text is spoken (openai/whisper, `timing.py`).

One teacher-forced pass over the text, with the window's cross-attention KV still in its pages:
where the alignment heads look is sharpened into one token-by-frame matrix, and dynamic time
warping finds the best monotonic path through it. Owns no page; knows nothing of words, segments
or queues. The filters and the steps of the time warping and their order are openai/whisper's too.
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

from cluster.common.errors import SequenceFailedError
from cluster.common.messages import WINDOW_S, Task, TokenAlignment
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.encoder_context import MEL_PER_POSITION
from cluster.common.model.text.tokenizer import WhisperTokenizer
from decoder_worker.alignment.heads import AlignmentHeads, KnownText
from decoder_worker.model import TextDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentItem(KnownText):
    """With start sequence and end its tokens must fit the text context.

    content_frames: mel frames that are audio and not padding.
    """

    language: str
    task: Task
    content_frames: int


class Aligner:
    """Aligns texts with the KV in a decoder's pools. For the thread that runs the decoder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: WhisperTokenizer,
        decoder: TextDecoder,
        heads: AlignmentHeads,
    ) -> None:
        """decoder, heads: over the same pools; the decoder gives the logits."""
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._heads = heads
        self._dims = checkpoint.dims

    @torch.inference_mode()
    def align(self, items: Sequence[AlignmentItem]) -> list[TokenAlignment]:
        """The alignment of each item, whatever else is in the batch. Overwrites their self pages.

        Raises SequenceFailedError where an item gave no numbers; call it again for each alone.
        """
        starts = [self._tokenizer.sot_sequence(i.language, i.task, False) for i in items]
        eot = self._tokenizer.special.eot
        texts = [(*s, *item.tokens, eot) for s, item in zip(starts, items, strict=True)]
        counts = [len(text) for text in texts]
        states, found = self._heads.forward(items, texts, [0] * len(items))
        begins = accumulate(counts, initial=0)
        looks, probs = [], []
        for item, start, queries, begin, n in zip(
            items, starts, found, list(begins)[:-1], counts, strict=True
        ):
            n_sot = len(start) - 1  # without <|notimestamps|>, whose row predicts the first token
            looks.append(self._looks(item, queries)[n_sot:-1])
            probs.append(self._probs(states[begin + n_sot : begin + n - 2], item.tokens))
        return [
            self._alignment(item.tokens, look, prob)
            for item, look, prob in zip(items, looks, probs, strict=True)
        ]

    def _looks(self, item: AlignmentItem, queries: Mapping[int, Tensor]) -> Tensor:
        """How much each token looks at each frame, over all heads: float32 [n_tokens, n_frames]."""
        n_frames = self._n_frames(item)
        total = None
        for layer, q in queries.items():
            weights = self._heads.weights(layer, q, item.cross_pages, n_frames, item.n_positions)
            sharp = median_filter(standardise(weights)).sum(0)
            total = sharp if total is None else total + sharp
        assert total is not None
        return total / self._heads.n_heads

    def _n_frames(self, item: AlignmentItem) -> int:
        """Encoder frames of the audio: at least one, also for a single mel frame."""
        return min(max(1, item.content_frames // MEL_PER_POSITION), item.n_positions)

    def _probs(self, states: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Of each token, among all text, after the state before it: float32 [len(tokens)]."""
        logits = self._decoder.logits(states)[:, : self._tokenizer.special.eot]
        own = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        chosen = logits.gather(1, own[:, None])[:, 0]
        return (chosen - logits.logsumexp(-1)).exp()

    def _alignment(self, tokens: tuple[int, ...], look: Tensor, probs: Tensor) -> TokenAlignment:
        known = tuple(probs.tolist())
        matrix = look.cpu().numpy()
        if not np.isfinite(matrix).all() or not all(isfinite(prob) for prob in known):
            raise SequenceFailedError("the text could not be aligned: the model gave no numbers")
        frames_per_s = self._dims.n_audio_ctx / WINDOW_S
        times_s = tuple(frame / frames_per_s for frame in first_columns(-matrix))
        return TokenAlignment(tokens, times_s, known)


MEDIAN_WIDTH = 7  # frames, 140 ms

# Exchanges that bring the median of seven to the middle: Devillard, "Fast median search", 1998.
# fmt: off
_MEDIAN_NETWORK = (
    (0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6),
    (2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4),
)
# fmt: on


def standardise(weights: Tensor) -> Tensor:
    """Each frame's weights [heads, tokens, frames] against those of the other tokens.

    A frame at which all tokens look alike says nothing: 0, where openai/whisper has NaN.
    """
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    scaled = (weights - mean) / std
    return torch.where(std == 0, torch.zeros_like(scaled), scaled)


def median_filter(x: Tensor) -> Tensor:
    """Running median over frames, mirrored at both ends; x [heads, tokens, frames] float.

    Too few frames to mirror stay as they are.
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

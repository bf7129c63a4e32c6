"""A given text fed once over the KV of a window: the logits of each of its tokens, teacher-forced.

One forward for the whole text. Knows the page in which a window's KV lies, nothing of audio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cluster.kv.layout import PageLayout
from cluster.model.text.tokenizer import WhisperTokenizer
from decoder_worker.attention.base import AttentionBatch, PagedKV
from decoder_worker.model import TorchDecoder


class ForcedText:
    """A start of sequence in English without timestamps, and the text behind it.

    tokens: of the text alone, as many as the model has positions for.
    """

    def __init__(self, tokenizer: WhisperTokenizer, text: str, n_text_ctx: int) -> None:
        self._start = tokenizer.sot_sequence("en", "transcribe", False)
        self.tokens = tokenizer.encode(f" {text}")[: n_text_ctx - len(self._start)]

    def logits(
        self, decoder: TorchDecoder, page: int, self_layout: PageLayout, cross_layout: PageLayout
    ) -> Tensor:
        """float32 [n_tokens + 1, n_vocab]: of each token of the text, and of its end.

        Args:
            page: that holds a whole window's KV. The text's own goes to page 0 of the self pool.
        """
        tokens = [*self._start, *self.tokens]
        n, n_frames = len(tokens), cross_layout.n_frames
        decoder.plan(
            AttentionBatch(
                self_kv=PagedKV.make([n], [(0,)], [n], self_layout.page_frames),
                cross_kv=PagedKV.make([n], [(page,)], [n_frames], cross_layout.page_frames),
            )
        )
        hidden = decoder.states(torch.tensor(tokens), torch.arange(n))
        return decoder.logits(hidden[len(self._start) - 1 :])

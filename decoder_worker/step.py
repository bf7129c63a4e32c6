"""One decode step, from the slots and back to them: the same on a CPU and inside a CUDA graph.

It reads and writes nothing but tensors that stay where they are (weights, page pools, slot table,
what the attention backend planned), and asks the host for nothing, so that a captured step can be
replayed. Knows no sequences, no pages and no graphs.
"""

from __future__ import annotations

from torch import Tensor

from decoder_worker.attention.base import AttentionBackend
from decoder_worker.model import TextDecoder
from decoder_worker.sampling import Sampled, Sampler
from decoder_worker.slots import SlotTable


class DecodeStep:
    """Embedding, layers, logits, rules, sampling, and the slots' next token and position."""

    def __init__(self, model: TextDecoder, sampler: Sampler, slots: SlotTable) -> None:
        self.model = model
        self._sampler = sampler
        self._slots = slots

    def __call__(
        self, index: Tensor, attention: AttentionBackend, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """Feed the slots' tokens and sample their next ones.

        Args:
            index: int64 [n], the slots, in the order that `attention` was planned for.
            noisy, n_top: as in `Sampler`.
        """
        rows = self._slots.rows(index)
        attention.begin(rows.position)
        states = self.model(rows.token, rows.position, attention)
        return self._sampler(self.model.logits(states), rows, noisy, n_top)

    def sample(
        self, logits: Tensor, index: Tensor, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """The first token after a prompt, whose logits are known."""
        return self._sampler(logits, self._slots.rows(index), noisy, n_top)

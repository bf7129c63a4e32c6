"""One decode step, from the slots and back to them: the same on a CPU and inside a CUDA graph.

It reads and writes nothing but tensors that stay where they are (weights, page pools, slot table,
what the decoder planned), and asks the host for nothing, so that a captured step can be
replayed. Knows no sequences, no pages and no graphs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoder_worker.model import TextDecoder
from decoder_worker.sampling.sampler import Sampled, Sampler
from decoder_worker.sampling.slots import SlotTable


class DecodeStep:
    """Embedding, layers, logits, rules, sampling, and the slots' next token and position.

    no_speech: the token whose probability at the start of transcript says that nobody speaks.
    """

    def __init__(self, sampler: Sampler, slots: SlotTable, no_speech: int) -> None:
        self._sampler = sampler
        self._slots = slots
        self._no_speech = no_speech

    def __call__(
        self, index: Tensor, decoder: TextDecoder, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """Feed the slots' tokens and sample their next ones.

        Args:
            index: int64 [n], the slots, in the order that `decoder` was planned for.
            noisy, n_top: as in `Sampler`.
        """
        rows = self._slots.rows(index)
        states = decoder.states(rows.token, rows.position)
        return self._sampler(decoder.logits(states), rows, noisy, n_top)

    def start(
        self, tokens: Tensor, index: Tensor, decoder: TextDecoder, noisy: Tensor | None
    ) -> tuple[Sampled, Tensor]:
        """Run prompts that are start sequences of one length, and sample the first tokens.

        Args:
            tokens: int64 [n * length], the slots' prompts one after the other, from position 0.
            index, decoder, noisy: as above.

        Returns:
            What was sampled, and the probabilities of no speech, float32 [n].
        """
        n = len(index)
        positions = torch.arange(len(tokens) // n, device=tokens.device).repeat(n)
        states = decoder.states(tokens, positions)
        states = states.view(n, len(tokens) // n, states.shape[1])
        both = decoder.logits(torch.cat((states[:, 0], states[:, -1])))  # one pass over the weights
        return self.sample(both[n:], index, noisy), self.no_speech_probs(both[:n])

    def no_speech_probs(self, logits: Tensor) -> Tensor:
        """float32 [n] of logits [n, n_vocab] at the start of transcript, before any rule."""
        return (logits[:, self._no_speech] - logits.logsumexp(-1)).exp()

    def sample(
        self, logits: Tensor, index: Tensor, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """The first token after a prompt, whose logits are known."""
        return self._sampler(logits, self._slots.rows(index), noisy, n_top)

"""One decode step, from the slots and back to them: the same on a CPU and inside a CUDA graph.

It reads and writes nothing but tensors that stay where they are (weights, page pools, slot table,
what the decoder planned), and asks the host for nothing, so that a captured step can be
replayed. Knows no sequences, no pages and no graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from decoder_worker.model import TextDecoder
from decoder_worker.sampling.sampler import Sampled, Sampler, best_of
from decoder_worker.sampling.slots import SlotTable


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts one after the other, on the device; int64.

    tokens, positions [n_tokens]. read [2 n]: where among them the starts of transcript of the n
    prompts stand, then where their last tokens do. Behind a last token there may be others, which
    fill a prompt up: no token before them sees them, and what they leave in the pages is written
    over before it is read.
    """

    tokens: Tensor
    positions: Tensor
    read: Tensor


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
        """Feed the slots' tokens and sample their next ones; noisy, n_top as in `Sampler`.

        index: int64 [n], the slots, in the order that `decoder` was planned for.
        """
        rows = self._slots.rows(index)
        states = decoder.states(rows.token, rows.position)
        return self._sampler(decoder.logits(states), rows, noisy, n_top)

    def logits(self, index: Tensor, decoder: TextDecoder) -> Tensor:
        """Feed the slots' tokens; float32 [n, n_vocab]. The slots stay as they are."""
        rows = self._slots.rows(index)
        return decoder.logits(decoder.states(rows.token, rows.position))

    def prompt_logits(self, prompts: Prompts, decoder: TextDecoder) -> tuple[Tensor, Tensor]:
        """Run prompts; logits at their starts of transcript and last tokens, [n, n_vocab] each."""
        states = decoder.states(prompts.tokens, prompts.positions)
        both = decoder.logits(states[prompts.read])  # in one pass over the weights
        n = len(prompts.read) // 2
        return both[:n], both[n:]

    def start(
        self, prompts: Prompts, index: Tensor, decoder: TextDecoder, noisy: Tensor | None
    ) -> tuple[Sampled, Tensor]:
        """Run prompts, and sample the first token of each; the probabilities of no speech [n]."""
        sots, lasts = self.prompt_logits(prompts, decoder)
        return self.sample(lasts, index, noisy), self.no_speech_probs(sots)

    def language(self, prompts: Prompts, decoder: TextDecoder, languages: Tensor) -> Sampled:
        """The likeliest of the language tokens (int64 [m]); touches no slot."""
        return best_of(self.prompt_logits(prompts, decoder)[1], languages)

    def no_speech_probs(self, logits: Tensor) -> Tensor:
        """float32 [n] of logits [n, n_vocab] at the start of transcript, before any rule."""
        return (logits[:, self._no_speech] - logits.logsumexp(-1)).exp()

    def sample(
        self, logits: Tensor, index: Tensor, noisy: Tensor | None, n_top: int = 0
    ) -> Sampled:
        """The first token after a prompt, whose logits are known."""
        return self._sampler(logits, self._slots.rows(index), noisy, n_top)

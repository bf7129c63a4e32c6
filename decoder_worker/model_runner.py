"""Runs the model over sequences: language detection, prompts, and single decode steps.

It builds each forward's rows and page tables, runs the decoder, and samples. Every call reads
sequences and changes none of them; it writes only their own self-attention pages and slots, so a
call that raised can be repeated with fewer sequences after `restore`. Knows nothing of queues,
deadlines or transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cluster.kv.layout import KVLayout
from cluster.kv.pool import PagePool
from cluster.model.checkpoint import Checkpoint
from cluster.model.tokenizer import WhisperTokenizer
from cluster.model.weights import TORCH_DTYPES
from decoder_worker.attention.base import AttentionBackend, AttentionBatch, PagedKV
from decoder_worker.attention.torch_backend import TorchAttention
from decoder_worker.logit_rules import LogitRules
from decoder_worker.model import TextDecoder
from decoder_worker.sampling import Sampler, SamplingState, best_of
from decoder_worker.sequence import DecodeSequence

MAX_INITIAL_TIMESTAMP = 50  # steps of 20 ms: openai/whisper's max_initial_timestamp of 1.0 s


@dataclass(frozen=True, slots=True)
class StepOutput:
    """One sequence's outcome of a call; no_speech_prob is of the prompt's call only."""

    token: int
    logprob: float
    no_speech_prob: float = 0.0


def self_kv_layout(checkpoint: Checkpoint, dtype: str, page_tokens: int = 0) -> KVLayout:
    """Layout of one sequence's self-attention KV, for the longest text that it may have.

    page_tokens: positions in a page; 0 takes the whole text context, so that on a CPU attention
        reads a view without a gather.
    """
    dims = checkpoint.dims
    return KVLayout(
        model="self",
        n_layer=dims.n_text_layer,
        n_head=dims.n_text_head,
        head_dim=dims.text_head_dim,
        n_frames=dims.n_text_ctx,
        page_frames=page_tokens or dims.n_text_ctx,
        dtype=dtype,
    )


class ModelRunner:
    """Owns weights, self-attention pool and sampling state. For one thread at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: WhisperTokenizer,
        cross_pool: PagePool,
        self_pool: PagePool,
        n_slots: int,
    ) -> None:
        """The device is the pools', the dtype the self pool's."""
        self._tokenizer = tokenizer
        self._device = self_pool.device
        self._cross_layout, self._self_layout = cross_pool.layout, self_pool.layout
        dtype = TORCH_DTYPES[self_pool.layout.dtype]
        self.model = TextDecoder.load(checkpoint, dtype, self._device)
        self.attention: AttentionBackend = TorchAttention(self_pool.tensor, cross_pool.tensor)
        listed = checkpoint.generation_config.get("max_initial_timestamp_index")
        limit = MAX_INITIAL_TIMESTAMP if listed is None else int(listed)
        self._state = SamplingState(n_slots, self._device)
        self._rules = LogitRules(tokenizer, limit, self._device)
        self._sample = Sampler(self._rules, self._state)
        self._language_tokens = torch.tensor(
            list(tokenizer.special.languages.values()), dtype=torch.int64, device=self._device
        )

    @torch.inference_mode()
    def detect_language(self, sequences: Sequence[DecodeSequence]) -> list[StepOutput]:
        """The likeliest language token after `<|startoftranscript|>` alone.

        Overwrites the first position of the sequences' self-attention KV.
        """
        sot = self._tokenizer.special.sot
        states = self._forward(sequences, [[sot]] * len(sequences), [0] * len(sequences))
        best = best_of(self.model.logits(states), self._language_tokens)
        return _outputs(best.tokens, best.logprobs)

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[DecodeSequence]) -> list[StepOutput]:
        """Run the prompts of any lengths in one batch, and sample each one's first token."""
        for sequence in sequences:
            self.restore(sequence)
        prompts = [sequence.prompt for sequence in sequences]
        states = self._forward(sequences, [p.tokens for p in prompts], [0] * len(sequences))
        begins = list(accumulate((len(p.tokens) for p in prompts), initial=0))
        sot_rows = [begin + p.sot for begin, p in zip(begins[:-1], prompts, strict=True)]
        last_rows = [end - 1 for end in begins[1:]]
        at_sot = self.model.logits(states[sot_rows])
        no_speech = (at_sot[:, self._tokenizer.special.no_speech] - at_sot.logsumexp(-1)).exp()
        return self._next(self.model.logits(states[last_rows]), sequences, no_speech)

    @torch.inference_mode()
    def decode(self, sequences: Sequence[DecodeSequence]) -> list[StepOutput]:
        """One step: feed each sequence's last token, sample the next."""
        tokens = [[sequence.last_token] for sequence in sequences]
        states = self._forward(sequences, tokens, [sequence.n_cached for sequence in sequences])
        return self._next(self.model.logits(states), sequences, None)

    def restore(self, sequence: DecodeSequence) -> None:
        """Set the sequence's slot from what it has sampled so far."""
        self._state.load(
            sequence.slot, sequence.slot_options(), sequence.tokens, self._rules.timestamp_begin
        )

    def _forward(
        self,
        sequences: Sequence[DecodeSequence],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> Tensor:
        """Feed tokens[i] to sequence i from position starts[i] on; states [n_tokens, state]."""
        counts = [len(own) for own in tokens]
        lengths = [start + n for start, n in zip(starts, counts, strict=True)]
        n_frames = self._cross_layout.n_frames
        self.attention.plan(
            AttentionBatch(
                self_kv=PagedKV.make(
                    counts,
                    [sequence.self_pages for sequence in sequences],
                    lengths,
                    self._self_layout.page_frames,
                ),
                cross_kv=PagedKV.make(
                    counts,
                    [sequence.cross_pages for sequence in sequences],
                    [n_frames] * len(sequences),
                    self._cross_layout.page_frames,
                ),
            )
        )
        flat = [token for own in tokens for token in own]
        spans = zip(starts, lengths, strict=True)
        positions = [position for start, end in spans for position in range(start, end)]
        return self.model(self._indices(flat), self._indices(positions), self.attention)

    def _next(
        self, logits: Tensor, sequences: Sequence[DecodeSequence], no_speech: Tensor | None
    ) -> list[StepOutput]:
        slots = self._indices([sequence.slot for sequence in sequences])
        noisy = [i for i, sequence in enumerate(sequences) if sequence.options.temperature > 0]
        sampled = self._sample(logits, slots, self._indices(noisy) if noisy else None)
        return _outputs(sampled.tokens, sampled.logprobs, no_speech)

    def _indices(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _outputs(tokens: Tensor, logprobs: Tensor, no_speech: Tensor | None = None) -> list[StepOutput]:
    """The only place that reads a step's results back to the host."""
    probs = [0.0] * len(tokens) if no_speech is None else no_speech.tolist()
    columns = zip(tokens.tolist(), logprobs.tolist(), probs, strict=True)
    return [StepOutput(token, logprob, prob) for token, logprob, prob in columns]

"""Whisper's logit filters, for a whole batch at once, on the logits' device.

The rules are those of openai/whisper's `decoding.py`. They need only `History` of what was sampled,
so a step reads no tokens back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cluster.common.model.text.tokenizer import WhisperTokenizer

NEVER = float("-inf")
NO_TIMESTAMP = -1


@dataclass(frozen=True, slots=True)
class History:
    """What the rules need to know of the sampled tokens; all [n], on the logits' device.

    n_sampled: int64, tokens sampled after the prompt. last_is_timestamp: bool, False before the
    first token. before_is_timestamp: bool, of the token before the last; True if there is none.
    last_timestamp: int64, as index from <|0.00|>, or NO_TIMESTAMP. timed: bool, decode with
    timestamps; if False only the suppress lists apply.
    """

    n_sampled: Tensor
    last_is_timestamp: Tensor
    before_is_timestamp: Tensor
    last_timestamp: Tensor
    timed: Tensor

    def after(self, tokens: Tensor, timestamp_begin: int) -> History:
        is_timestamp = tokens >= timestamp_begin
        stamp = tokens - timestamp_begin
        return History(
            n_sampled=self.n_sampled + 1,
            last_is_timestamp=is_timestamp,
            before_is_timestamp=self.last_is_timestamp | (self.n_sampled == 0),
            last_timestamp=torch.where(is_timestamp, stamp, self.last_timestamp),
            timed=self.timed,
        )


class Marks(NamedTuple):
    """Ids that divide the vocabulary, and the highest index of a first timestamp."""

    eot: int
    no_timestamps: int
    timestamp_begin: int
    latest_first: int


class LogitRules:
    """The filters of one checkpoint. Tokens that only a prompt may hold are suppressed too."""

    def __init__(
        self,
        tokenizer: WhisperTokenizer,
        max_initial_timestamp: int | None,
        device: torch.device | str,
    ) -> None:
        """suppressed: float32 [n_vocab], added to logits. begin: int64 ids, suppressed at first."""
        special = tokenizer.special
        self.eot = special.eot
        self.timestamp_begin = special.timestamp_begin
        self.no_timestamps = special.no_timestamps
        prompt_only = (
            *(special.sot, special.sot_prev, special.sot_lm),
            *(special.transcribe, special.translate, special.no_speech),
        )
        suppressed = torch.zeros(tokenizer.n_vocab)
        suppressed[[*tokenizer.suppress_tokens, *prompt_only]] = NEVER
        suppressed[special.timestamp_end + 1 :] = NEVER  # rows that pad the embedding
        self.suppressed = suppressed.to(device)
        self.begin = torch.tensor(tokenizer.begin_suppress_tokens, dtype=torch.int64, device=device)
        n_stamps = tokenizer.n_vocab - special.timestamp_begin
        self.latest_first = n_stamps if max_initial_timestamp is None else max_initial_timestamp

    @property
    def marks(self) -> Marks:
        return Marks(self.eot, self.no_timestamps, self.timestamp_begin, self.latest_first)

    def apply(self, logits: Tensor, history: History) -> Tensor:
        return apply_rules(logits, history, self.suppressed, self.begin, self.marks)


def apply_rules(
    logits: Tensor, history: History, suppressed: Tensor, begin: Tensor, marks: Marks
) -> Tensor:
    """Set forbidden tokens to -inf in logits float32 [n, n_vocab], in place; returns them."""
    first = history.n_sampled == 0
    logits += suppressed
    logits[:, begin] = logits[:, begin].masked_fill_(first[:, None], NEVER)
    timed, last, before = history.timed, history.last_is_timestamp, history.before_is_timestamp
    ends_segment = last & ~before  # text, timestamp: now a timestamp or the end
    begins_segment = last & before  # a pair, or the first timestamp: now text or the end
    words, text, stamps = (
        logits[:, : marks.eot],
        logits[:, marks.eot : marks.timestamp_begin],
        logits[:, marks.timestamp_begin :],
    )
    logits[:, marks.no_timestamps].masked_fill_(timed, NEVER)

    # A segment's first timestamp may repeat the last one's end; its own end must be later.
    stamp = torch.arange(stamps.shape[1], device=logits.device)
    lowest = history.last_timestamp + (~ends_segment).long()
    forbidden = (stamp < lowest[:, None]) | begins_segment[:, None]
    forbidden |= first[:, None] & (stamp > marks.latest_first)
    stamps.masked_fill_(forbidden & timed[:, None], NEVER)

    # All timestamps together against the best single other token that is still allowed.
    best = torch.maximum(words.amax(-1).masked_fill_(ends_segment, NEVER), text.amax(-1))
    stamps_only = first | (stamps.logsumexp(-1) > best)
    words.masked_fill_((timed & (stamps_only | ends_segment))[:, None], NEVER)
    text.masked_fill_((timed & stamps_only)[:, None], NEVER)
    return logits

"""Words with times, from the tokens' alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.messages import TokenAlignment
from cluster.model.tokenizer import WhisperTokenizer

if TYPE_CHECKING:
    from router.gather import Segment


@dataclass(frozen=True, slots=True)
class Word:
    """One word as spoken, with its leading space and its punctuation. Times in s of the upload."""

    start: float
    end: float
    word: str
    probability: float


def add_words(
    segments: Sequence[Segment],
    alignment: TokenAlignment,
    tokenizer: WhisperTokenizer,
    *,
    offset_s: float,
    last_speech_s: float,
) -> list[Segment]:
    """The segments with their words, and with their bounds set by them."""
    raise NotImplementedError

"""Which tokens of an update are confirmed: the policies, behind one small protocol.

`AttentionPeak` is AlignAtt (Simul-Whisper, arXiv 2406.10052; SimulStreaming, 2506.17077): a token
is confirmed unless its attention peak lies in the last moments of the audio, since the audio that
follows may still change such a token. `LocalAgreement` is LocalAgreement-2 (whisper_streaming): a
token is confirmed when two updates in a row have it. Both see the tokens after the confirmed ones.

Under every policy, only whole words are confirmed, and never the punctuation after the last of
them: an update that is forced to begin with a full stop tends to end its text there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.common.messages import SAMPLE_RATE
from cluster.common.model.dims import ModelDims
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.settings import LivePolicy

POSITIONS_PER_S = SAMPLE_RATE // SAMPLES_PER_POSITION  # 50
REWIND = 2 * POSITIONS_PER_S  # positions by which a peak may lie before the latest one
SPACELESS = frozenset(("zh", "ja", "th", "lo", "my", "yue"))  # as openai/whisper splits words


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """The tokens that an update decoded after the confirmed ones.

    logprobs: log probability of each of `tokens`.
    peaks: the attention peak of each of `tokens`, a position from the utterance's start; empty if
        none were asked for.
    end: the position where the update's audio ended.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    peaks: tuple[int, ...]
    end: int

    def after(self, n: int) -> Hypothesis:
        """The same without the first n tokens."""
        return Hypothesis(self.tokens[n:], self.logprobs[n:], self.peaks[n:], self.end)


class Policy(Protocol):
    """A rule for which tokens are confirmed. It keeps nothing between updates."""

    @property
    def needs_peaks(self) -> bool:
        """Whether updates must return attention peaks."""

    def count_confirmed(
        self, new: Hypothesis, last: Hypothesis | None, eot: int, attended_to: int
    ) -> int:
        """How many of the tokens of `new` are confirmed, counted from the first.

        Args:
            last: the update before, from the same token on; None if there was none.
            eot: the end-of-text token; tokens below it are text, tokens above it timestamps.
            attended_to: the latest attention peak of the tokens confirmed before.
        """


@dataclass(frozen=True, slots=True)
class AttentionPeak:
    """hold_s: seconds before the audio's end in which a confirmed token's peak must not lie."""

    hold_s: float = 0.5
    needs_peaks: bool = True

    def count_confirmed(
        self, new: Hypothesis, last: Hypothesis | None, eot: int, attended_to: int
    ) -> int:
        """See `Policy.count_confirmed`. After a peak that jumps far back, attention has lost its
        place, and no token is confirmed."""
        if len(new.peaks) != len(new.tokens):
            return 0  # the worker returned no peaks
        limit = new.end - round(self.hold_s * POSITIONS_PER_S)
        for index, (token, peak) in enumerate(zip(new.tokens, new.peaks, strict=True)):
            if token > eot:
                continue
            if peak >= limit or peak < attended_to - REWIND:
                return index
            attended_to = max(attended_to, peak)
        return len(new.tokens)


@dataclass(frozen=True, slots=True)
class LocalAgreement:
    """Confirms text that two updates in a row have; their timestamps may differ."""

    needs_peaks: bool = False

    def count_confirmed(
        self, new: Hypothesis, last: Hypothesis | None, eot: int, attended_to: int
    ) -> int:
        """See `Policy.count_confirmed`."""
        if last is None:
            return 0
        texts = [index for index, token in enumerate(new.tokens) if token < eot]
        earlier = [token for token in last.tokens if token < eot]
        n = 0
        for index, token in zip(texts, earlier, strict=False):
            if new.tokens[index] != token:
                break
            n = index + 1
        return n


def chosen_policy(choice: LivePolicy, dims: ModelDims) -> Policy:
    """The policy that a setting asks for; "auto" chooses by the checkpoint's shape.

    In another implementation, the attention of a decoder with far fewer layers than its encoder
    (large-v3-turbo) was seen not to peak at the words.
    """
    if choice == "auto":
        is_shallow = 2 * dims.n_text_layer < dims.n_audio_layer
        choice = "local_agreement" if is_shallow else "attention_peak"
    return LocalAgreement() if choice == "local_agreement" else AttentionPeak()


def confirmed_words(
    policy: Policy,
    tokenizer: WhisperTokenizer,
    new: Hypothesis,
    last: Hypothesis | None,
    attended_to: int,
    language: str,
) -> int:
    """How many of the tokens of `new` are confirmed and make whole words."""
    n = policy.count_confirmed(new, last, tokenizer.special.eot, attended_to)
    return whole_words(tokenizer, new.tokens, n, language)


def whole_words(tokenizer: WhisperTokenizer, tokens: Sequence[int], n: int, language: str) -> int:
    """The largest number of tokens, at most n, that ends with a whole word.

    Timestamps and punctuation after that word are left out, since they depend on what follows.
    """
    pieces = [tokenizer.decode_bytes([token]) for token in tokens]
    while n and not _ends_word(tokenizer, pieces, n, language):
        n -= 1
    return n


def _ends_word(tokenizer: WhisperTokenizer, pieces: Sequence[bytes], n: int, language: str) -> bool:
    """Whether the first n tokens end with a whole word."""
    if not _is_wordy(pieces[n - 1]):
        return False
    if language in SPACELESS:
        try:
            b"".join(pieces[:n]).decode()
        except UnicodeDecodeError:
            return False
        return True
    for piece in pieces[n:]:
        if not piece or piece.startswith(b" "):
            return True  # a timestamp, or the next word
        if _is_wordy(piece):
            return False  # the rest of this word
    return True


def _is_wordy(piece: bytes) -> bool:
    """Whether a token holds a letter or digit, or a part of a character's bytes."""
    text = piece.decode("utf-8", errors="replace")
    return any(char.isalnum() or char == "\N{REPLACEMENT CHARACTER}" for char in text)

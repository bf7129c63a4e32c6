"""Which tokens of an update are certain: the policies, behind one small protocol.

`AttentionPeak` is AlignAtt (Simul-Whisper, arXiv 2406.10052; SimulStreaming, 2506.17077): a token
is certain unless the alignment heads were looking at the last moments of the audio when it was
predicted, where what follows may still change it. `LocalAgreement` is LocalAgreement-2
(whisper_streaming): a token is certain once two updates running have it. Both see what was decoded
behind the tokens that are certain already.

Whatever the policy says, a word is certain only as a whole, and never with the punctuation behind
it while nothing certain follows: a full stop that is forced too early ends the text there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.messages import SAMPLE_RATE
from cluster.model.dims import ModelDims
from cluster.model.encoder_context import SAMPLES_PER_POSITION
from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.settings import LivePolicy

POSITIONS_PER_S = SAMPLE_RATE // SAMPLES_PER_POSITION  # 50
REWIND = 2 * POSITIONS_PER_S  # positions that attention may look back behind where it was
SPACELESS = frozenset(("zh", "ja", "th", "lo", "my", "yue"))  # as openai/whisper splits words


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What an update decoded behind the tokens that are certain.

    peaks: for each of `tokens` the encoder position, from the stretch's start, at which attention
        had its maximum; empty where none were asked for.
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
    """A rule for what is certain. It keeps nothing between updates."""

    @property
    def needs_peaks(self) -> bool:
        """Whether updates have to tell where attention was."""

    def agreed(self, new: Hypothesis, last: Hypothesis | None, eot: int, looked_to: int) -> int:
        """How many of the tokens of `new`, from the first on, are certain.

        Args:
            last: the update before, from the same token on; None where there was none.
            eot: the tokens below it are text, those above timestamps.
            looked_to: the furthest position of the tokens that are certain already.
        """


@dataclass(frozen=True, slots=True)
class AttentionPeak:
    """hold_s: seconds before the audio's end where a token's attention must not have its peak."""

    hold_s: float = 0.5
    needs_peaks: bool = True

    def agreed(self, new: Hypothesis, last: Hypothesis | None, eot: int, looked_to: int) -> int:
        """See `Policy.agreed`. Attention that jumps far back has lost its place: nothing from
        there on is certain."""
        if len(new.peaks) != len(new.tokens):
            return 0  # of a worker that could not tell
        limit = new.end - round(self.hold_s * POSITIONS_PER_S)
        for index, (token, peak) in enumerate(zip(new.tokens, new.peaks, strict=True)):
            if token > eot:
                continue
            if peak >= limit or peak < looked_to - REWIND:
                return index
            looked_to = max(looked_to, peak)
        return len(new.tokens)


@dataclass(frozen=True, slots=True)
class LocalAgreement:
    """Two updates running say the same text; their timestamps may differ."""

    needs_peaks: bool = False

    def agreed(self, new: Hypothesis, last: Hypothesis | None, eot: int, looked_to: int) -> int:
        """See `Policy.agreed`."""
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
    """The policy that a setting asks for; for "auto" by the checkpoint's shape.

    Attention of a decoder that is much shallower than its encoder was seen not to point at words
    (large-v3-turbo, in another implementation).
    """
    if choice == "auto":
        is_shallow = 2 * dims.n_text_layer < dims.n_audio_layer
        choice = "local_agreement" if is_shallow else "attention_peak"
    return LocalAgreement() if choice == "local_agreement" else AttentionPeak()


def certain(
    policy: Policy,
    tokenizer: WhisperTokenizer,
    new: Hypothesis,
    last: Hypothesis | None,
    looked_to: int,
    language: str,
) -> int:
    """How many of the tokens of `new` are certain, in whole words."""
    n = policy.agreed(new, last, tokenizer.special.eot, looked_to)
    return whole_words(tokenizer, new.tokens, n, language)


def whole_words(tokenizer: WhisperTokenizer, tokens: Sequence[int], n: int, language: str) -> int:
    """The largest number of tokens, at most n, that ends behind a word.

    Without timestamps and punctuation behind that word, since these belong to what follows.
    """
    pieces = [tokenizer.decode_bytes([token]) for token in tokens]
    while n and not _ends_word(tokenizer, pieces, n, language):
        n -= 1
    return n


def _ends_word(tokenizer: WhisperTokenizer, pieces: Sequence[bytes], n: int, language: str) -> bool:
    """Whether a word that is worth telling ends behind the first n tokens."""
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
    """Whether a token holds a part of a word; part of a character counts as one."""
    text = piece.decode("utf-8", errors="replace")
    return any(char.isalnum() or char == "\N{REPLACEMENT CHARACTER}" for char in text)

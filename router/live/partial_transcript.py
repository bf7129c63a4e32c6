"""Keeps the text of one utterance so far, and decides which of its tokens are confirmed.

`AttentionPeak` is AlignAtt (Simul-Whisper, arXiv 2406.10052; SimulStreaming, 2506.17077): a token
is confirmed unless its attention peak lies in the last moments of the audio. `LocalAgreement` is
LocalAgreement-2 (whisper_streaming): a token is confirmed when two successive updates agree on it.

Only whole words are confirmed, without the punctuation after the last one: an update whose forced
prefix ends with a full stop tends to stop there. Positions count from the utterance's start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.common.messages import SAMPLE_RATE, Pcm
from cluster.common.model.dims import ModelDims
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import UNSPACED, split_tokens
from cluster.common.settings import LivePolicy
from router.live.interface import TurnSegment
from router.live.turns import Token, Utterance, quietest, seconds
from router.words import ends_sentence

POSITIONS_PER_S = SAMPLE_RATE // SAMPLES_PER_POSITION  # 50
REWIND = 2 * POSITIONS_PER_S  # how far, in positions, a peak may lie before the latest one
MOST_LOOKED_AT = 16  # boundaries, the last ones, among which the quietest is chosen
LATEST_FIRST_STAMP = 50  # positions (1.0 s); Whisper's rules allow no later first timestamp


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: tuple[Token, ...]
    end: int  # position at which its audio ended
    language: str
    is_trusted: bool = True  # see `router.live.updates.is_trusted`
    is_cut: bool = False  # it reached the token limit, so more text may follow


@dataclass(frozen=True, slots=True)
class AttentionPeak:
    hold_s: float = 0.5  # end of the audio in which no confirmed token's peak may lie

    def count_confirmed(
        self, new: Hypothesis, last: Hypothesis | None, eot: int, attended_to: int
    ) -> int:
        """Return how many of `new`'s tokens are confirmed. attended_to: the latest confirmed peak.
        A peak that is more than REWIND before it ends them, since attention is lost there.
        """
        limit = new.end - round(self.hold_s * POSITIONS_PER_S)
        for index, token in enumerate(new.tokens):
            if token.id > eot:
                continue
            if token.peak is None or not attended_to - REWIND <= token.peak < limit:
                return index
            attended_to = max(attended_to, token.peak)
        return len(new.tokens)


@dataclass(frozen=True, slots=True)
class LocalAgreement:
    """Compares text tokens only; the timestamps of two updates may differ."""

    def count_confirmed(
        self, new: Hypothesis, last: Hypothesis | None, eot: int, attended_to: int
    ) -> int:
        if last is None:
            return 0
        texts = [index for index, token in enumerate(new.tokens) if token.id < eot]
        earlier = [token.id for token in last.tokens if token.id < eot]
        n = 0
        for index, token in zip(texts, earlier, strict=False):
            if new.tokens[index].id != token:
                break
            n = index + 1
        return n


Policy = AttentionPeak | LocalAgreement  # both are stateless


def chosen_policy(choice: LivePolicy, dims: ModelDims) -> Policy:
    if choice == "auto":
        # Other implementations found that the attention of such decoders (large-v3-turbo) does not
        # peak at the words.
        is_shallow = 2 * dims.n_text_layer < dims.n_audio_layer
        choice = "local_agreement" if is_shallow else "attention_peak"
    return LocalAgreement() if choice == "local_agreement" else AttentionPeak()


def whole_words(tokenizer: WhisperTokenizer, tokens: Sequence[Token], n: int, language: str) -> int:
    """Reduce `n` until the first n tokens end with a whole word."""
    pieces = [tokenizer.decode_bytes([token.id]) for token in tokens]
    while n and not _ends_word(tokenizer, pieces, n, language):
        n -= 1
    return n


def _ends_word(tokenizer: WhisperTokenizer, pieces: Sequence[bytes], n: int, language: str) -> bool:
    if not _is_wordy(pieces[n - 1]):
        return False
    if language in UNSPACED:
        try:
            b"".join(pieces[:n]).decode()
        except UnicodeDecodeError:
            return False
        return True
    for piece in pieces[n:]:
        if not piece or piece.startswith(b" "):
            return True  # a timestamp or the next word
        if _is_wordy(piece):
            return False  # the rest of this word
    return True


def _is_wordy(piece: bytes) -> bool:
    """Return whether a token holds a letter, a digit or a part of a character's bytes."""
    text = piece.decode("utf-8", errors="replace")
    return any(char.isalnum() or char == "\N{REPLACEMENT CHARACTER}" for char in text)


class PartialTranscript:
    def __init__(self, utterance: Utterance, policy: Policy, tokenizer: WhisperTokenizer) -> None:
        self.utterance = utterance
        self.last: Hypothesis | None = None  # the last update's tokens after the confirmed ones
        self.last_end = utterance.start  # sample at which that update's audio ended
        self._policy = policy
        self._tokenizer = tokenizer
        self._begin = tokenizer.special.timestamp_begin
        self._tokens: list[Token] = []

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        return tuple(token.id for token in self._tokens)

    @property
    def attended_to(self) -> int:
        """The latest attention peak of the confirmed tokens, or 0."""
        return max((token.peak for token in self._tokens if token.peak is not None), default=0)

    def add_update(self, decoded: Hypothesis, end: int) -> list[Token]:
        """Add an update of the audio up to sample `end`. Return the tokens that it confirms."""
        before, self.last, self.last_end = self.last, None, end
        if not decoded.is_trusted:
            return []
        eot = self._tokenizer.special.eot
        n = self._policy.count_confirmed(decoded, before, eot, self.attended_to)
        n = whole_words(self._tokenizer, decoded.tokens, n, decoded.language)
        self.last = replace(decoded, tokens=decoded.tokens[n:])
        self._tokens += decoded.tokens[:n]
        return list(decoded.tokens[:n])

    def add_final(self, decoded: Hypothesis) -> list[Token]:
        self.last = None
        fresh = list(decoded.tokens) if decoded.is_trusted else []
        self._tokens += fresh
        return fresh

    def covers(self, sample: int) -> bool:
        """Return whether the last update heard up to `sample`, and nothing after the turn's end."""
        if self.last is None or self.last.is_cut:
            return False
        turn_end = self.utterance.turn.end
        return sample <= self.last_end and (turn_end is None or self.last_end <= turn_end)

    def text_end(self) -> int:
        """Return the sample where the confirmed text ends, or the start if that is not known."""
        stamps = [token.id - self._begin for token in self._tokens if token.id >= self._begin]
        is_closed = bool(self._tokens) and self._tokens[-1].id >= self._begin
        attended_to = self.attended_to
        reach = stamps[-1] if is_closed else attended_to and max([attended_to, *stamps])
        return self.utterance.start + reach * SAMPLES_PER_POSITION

    # -- cutting -----------------------------------------------------------------------------

    def cut(self, audio: Pcm, *, anywhere: bool = False) -> list[TurnSegment]:
        """Cut off the beginning at a quiet place after a sentence, and return its segments.

        anywhere: also between two confirmed words, if no sentence has ended.
        """
        sentences = self._boundaries(self._ends_sentence)
        boundaries = sentences[-1:] or (self._boundaries(self._begins_word) if anywhere else [])
        places = [
            (*quietest(audio, first * SAMPLES_PER_POSITION, last * SAMPLES_PER_POSITION), index)
            for index, first, last in boundaries[-MOST_LOOKED_AT:]
        ]
        sample, _, index = min(places, key=lambda place: place[1], default=(0, 0.0, 0))
        at = sample // SAMPLES_PER_POSITION
        if at <= 0:
            return []
        segments = self._segments(self._tokens[:index], at)
        self._move(at, self._tokens[index:])
        return segments

    def remaining_segments(self) -> list[TurnSegment]:
        end = self.utterance.end if self.utterance.end is not None else self.last_end
        return self._segments(self._tokens, (end - self.utterance.start) // SAMPLES_PER_POSITION)

    def _boundaries(self, is_one: Callable[[int], bool]) -> list[tuple[int, int, int]]:
        """Return (index of the next token, first position, last position) of each place to cut."""
        places = []
        for index in range(1, len(self._tokens)):
            if not is_one(index):
                continue
            peaks = [token.peak for token in self._tokens[:index] if token.peak is not None][-3:]
            later = [token for token in self._tokens[index:] if token.id < self._begin]
            last = next((token.peak for token in later if token.peak is not None), 0)
            if peaks and max(peaks) < last:
                places.append((index, max(peaks), last))
                continue
            before, after = (
                token.id - self._begin for token in self._tokens[index - 1 : index + 1]
            )
            if 0 <= before <= after and later:
                places.append((index, before, after))
        return places

    def _ends_sentence(self, index: int) -> bool:
        before, after = (token.id >= self._begin for token in self._tokens[index - 1 : index + 1])
        if before or after:
            return before and after
        text = self._tokenizer.decode([token.id for token in self._tokens[:index]])
        return ends_sentence(text) and self._begins_word(index)

    def _begins_word(self, index: int) -> bool:
        piece = self._tokenizer.decode_bytes([self._tokens[index].id])
        if self.utterance.turn.language in UNSPACED:
            return _is_wordy(piece) and not 0x80 <= piece[0] < 0xC0  # the first byte of a character
        return piece.startswith(b" ")

    def _move(self, at: int, kept: Sequence[Token]) -> None:
        """Start the utterance `at` positions later, with the tokens `kept` after a timestamp."""
        utterance, begin = self.utterance, self._begin
        utterance.start += at * SAMPLES_PER_POSITION
        utterance.speech = utterance.speech_after(utterance.start) or utterance.speech[-1:]
        if self.last is not None:
            tokens = tuple(self._shifted(token, at) for token in self.last.tokens)
            self.last = replace(self.last, tokens=tokens, end=self.last.end - at)
        self._tokens = [self._shifted(token, at) for token in kept]
        if self._tokens and (first := self._tokens[0]).id >= begin:
            self._tokens[0] = replace(first, id=min(first.id, begin + LATEST_FIRST_STAMP))
        elif self._tokens:
            self._tokens.insert(0, Token(begin, 0.0, None))

    def _shifted(self, token: Token, at: int) -> Token:
        return Token(
            token.id if token.id < self._begin else max(self._begin, token.id - at),
            token.logprob,
            None if token.peak is None else max(0, token.peak - at),
        )

    def _segments(self, tokens: Sequence[Token], end: int) -> list[TurnSegment]:
        """Split `tokens` at their timestamps. The last segment ends at position `end`."""
        turn, begin = self.utterance.turn, self._begin
        split = split_tokens([token.id for token in tokens], begin)
        spans = [(piece.start, piece.end, piece.tokens) for piece in split.pieces]
        if split.tail:
            stamped = split.tail[0] >= begin
            spans.append(
                (split.tail[0] - begin if stamped else spans[-1][1] or 0, None, split.tail)
            )
        places = []
        for first, last, piece in spans:
            text = self._tokenizer.decode(piece).strip()
            if piece and piece[0] >= begin:
                first = piece[0] - begin
            last = end if last is None or last < first else min(last, end)
            if text:
                at = [
                    seconds(self.utterance.start + p * SAMPLES_PER_POSITION - turn.start)
                    for p in (min(first, last), last)
                ]
                places.append(TurnSegment(turn.number, text, max(0.0, at[0]), max(0.0, at[1])))
        return places

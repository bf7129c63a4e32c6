"""The partial transcript of one utterance: its confirmed tokens, and what the last update decoded.

Bookkeeping of tokens and positions only: results of updates come in, newly confirmed tokens go out.
When the utterance grows long, its beginning is cut off after confirmed words. Positions are encoder
positions of 20 ms, counted from the utterance's start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.common.messages import Pcm
from cluster.common.model.encoder_context import SAMPLES_PER_POSITION
from cluster.common.model.text.tokenizer import WhisperTokenizer
from cluster.common.model.text.words import split_tokens
from router.live.interface import TurnSegment
from router.live.policies import Hypothesis, Policy, confirmed_words
from router.live.timeline import Utterance, ends_sentence, quietest, seconds
from router.live.update_decoder import UpdateResult

MOST_LOOKED_AT = 16  # boundaries; of the last ones, the quietest is taken
LATEST_FIRST_STAMP = 50  # positions, 1.0 s: Whisper's rules let no text begin later


@dataclass(frozen=True, slots=True)
class ConfirmedToken:
    """A confirmed token. peak: position of its attention peak; None if none was asked for."""

    token: int
    logprob: float
    peak: int | None


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place between two confirmed tokens where the utterance may be cut.

    index: of the first token after it. first, last: the positions between which to cut.
    """

    index: int
    first: int
    last: int


class PartialTranscript:
    """The text of an utterance as far as it is known."""

    def __init__(self, utterance: Utterance, policy: Policy, tokenizer: WhisperTokenizer) -> None:
        self.utterance = utterance
        self.last: UpdateResult | None = None  # the last update's tokens after the confirmed ones
        self.last_end = utterance.start  # the sample where that update's audio ended
        self._policy = policy
        self._tokenizer = tokenizer
        self._tokens: list[ConfirmedToken] = []

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        """The confirmed tokens, with which the next update is forced to begin."""
        return tuple(item.token for item in self._tokens)

    @property
    def attended_to(self) -> int:
        """The latest attention peak of the confirmed tokens; 0 if there is none."""
        return max((item.peak for item in self._tokens if item.peak is not None), default=0)

    def add_update(self, decoded: UpdateResult, end: int) -> list[ConfirmedToken]:
        """Take the result of an update of the audio up to sample `end`.

        Returns:
            The tokens that are confirmed by it.
        """
        self.last_end = end
        if not decoded.is_trusted:
            self.last = None
            return []
        before = self.last.hypothesis if self.last is not None else None
        new = decoded.hypothesis
        n = confirmed_words(
            self._policy, self._tokenizer, new, before, self.attended_to, decoded.language
        )
        self.last = replace(decoded, hypothesis=new.after(n))
        return self._add(new, n)

    def add_final(self, decoded: UpdateResult) -> list[ConfirmedToken]:
        """Confirm all tokens of the final update, since no more audio follows, and return them."""
        self.last = None
        hypothesis = decoded.hypothesis
        return self._add(hypothesis, len(hypothesis.tokens) if decoded.is_trusted else 0)

    def covers(self, sample: int) -> bool:
        """Whether the last update is trusted, and its audio reached `sample`."""
        return self.last is not None and self.last_end >= sample

    def _add(self, new: Hypothesis, n: int) -> list[ConfirmedToken]:
        begin = self._tokenizer.special.timestamp_begin
        fresh = [
            ConfirmedToken(
                token,
                new.logprobs[index],
                new.peaks[index] if new.peaks and token < begin else None,
            )
            for index, token in enumerate(new.tokens[:n])
        ]
        self._tokens += fresh
        return fresh

    def text_end(self) -> int:
        """The sample at which the confirmed text ends: its last timestamp, or its last word."""
        begin = self._tokenizer.special.timestamp_begin
        stamps = [item.token - begin for item in self._tokens if item.token >= begin]
        is_closed = bool(self._tokens) and self._tokens[-1].token >= begin
        reach = stamps[-1] if is_closed else max([self.attended_to, *stamps])
        return self.utterance.start + reach * SAMPLES_PER_POSITION

    # -- cutting -----------------------------------------------------------------------------

    def cut(self, audio: Pcm, *, anywhere: bool = False) -> list[TurnSegment]:
        """Cut the utterance's beginning off after confirmed words, where it is quietest.

        Args:
            audio: int16 [n_samples], the utterance's audio from its start.
            anywhere: also between two words, if no sentence has ended.

        Returns:
            The segments that were cut off; none if there was no place to cut.
        """
        sentences = self._boundaries(self._ends_sentence)
        boundaries = sentences[-1:] or (self._boundaries(self._begins_word) if anywhere else [])
        places = [
            (
                boundary,
                *quietest(
                    audio,
                    boundary.first * SAMPLES_PER_POSITION,
                    boundary.last * SAMPLES_PER_POSITION,
                ),
            )
            for boundary in boundaries[-MOST_LOOKED_AT:]
        ]
        if not places:
            return []
        boundary, sample, _ = min(places, key=lambda place: place[2])
        at = sample // SAMPLES_PER_POSITION
        if at <= 0:
            return []
        gone, kept = self._tokens[: boundary.index], self._tokens[boundary.index :]
        segments = self._segments(gone, at)
        self._move(at)
        self._tokens = self._restarted(kept, at)
        return segments

    def remaining_segments(self) -> list[TurnSegment]:
        """The segments of all confirmed tokens, for an utterance that has ended."""
        end = self.utterance.end if self.utterance.end is not None else self.last_end
        return self._segments(self._tokens, (end - self.utterance.start) // SAMPLES_PER_POSITION)

    def _boundaries(self, is_one: Callable[[int], bool]) -> list[Boundary]:
        """The boundaries that `is_one` accepts, with confirmed words on both sides, in order."""
        begin = self._tokenizer.special.timestamp_begin
        places = []
        for index in range(1, len(self._tokens)):
            if not is_one(index):
                continue
            first, last = self._peak_before(index), self._peak_from(index)
            if first is not None and last is not None and first < last:
                places.append(Boundary(index, first, last))
                continue
            before, after = (item.token - begin for item in self._tokens[index - 1 : index + 1])
            if 0 <= before <= after and any(i.token < begin for i in self._tokens[index:]):
                places.append(Boundary(index, before, after))
        return places

    def _ends_sentence(self, index: int) -> bool:
        """Whether a sentence ends before the token of this index."""
        begin = self._tokenizer.special.timestamp_begin
        before, after = (item.token for item in self._tokens[index - 1 : index + 1])
        if before >= begin or after >= begin:
            return before >= begin and after >= begin
        text = self._tokenizer.decode([item.token for item in self._tokens[:index]])
        return ends_sentence(text) and self._begins_word(index)

    def _begins_word(self, index: int) -> bool:
        return self._tokenizer.decode_bytes([self._tokens[index].token]).startswith(b" ")

    def _peak_before(self, index: int) -> int | None:
        places = [item.peak for item in self._tokens[:index] if item.peak is not None]
        return max(places[-3:], default=None)

    def _peak_from(self, index: int) -> int | None:
        return next((item.peak for item in self._tokens[index:] if item.peak is not None), None)

    def _move(self, at: int) -> None:
        """Move the utterance's start `at` positions later."""
        utterance = self.utterance
        utterance.start += at * SAMPLES_PER_POSITION
        utterance.speech = utterance.speech_after(utterance.start) or utterance.speech[-1:]
        if self.last is not None:
            old = self.last.hypothesis
            moved = Hypothesis(
                tuple(self._shifted(token, at) for token in old.tokens),
                old.logprobs,
                tuple(max(0, peak - at) for peak in old.peaks),
                old.end - at,
            )
            self.last = replace(self.last, hypothesis=moved)

    def _restarted(self, kept: Sequence[ConfirmedToken], at: int) -> list[ConfirmedToken]:
        """The tokens after a cut, as the shorter utterance must begin: with a timestamp."""
        begin = self._tokenizer.special.timestamp_begin
        moved = [
            ConfirmedToken(
                self._shifted(item.token, at),
                item.logprob,
                None if item.peak is None else max(0, item.peak - at),
            )
            for item in kept
        ]
        if moved and moved[0].token >= begin:
            moved[0] = replace(moved[0], token=min(moved[0].token, begin + LATEST_FIRST_STAMP))
        elif moved:
            moved.insert(0, ConfirmedToken(begin, 0.0, None))
        return moved

    def _shifted(self, token: int, at: int) -> int:
        begin = self._tokenizer.special.timestamp_begin
        return token if token < begin else max(begin, token - at)

    def _segments(self, tokens: Sequence[ConfirmedToken], end: int) -> list[TurnSegment]:
        """The segments between the timestamps of `tokens`; the last one ends at position `end`."""
        turn, begin = self.utterance.turn, self._tokenizer.special.timestamp_begin
        split = split_tokens([item.token for item in tokens], begin)
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

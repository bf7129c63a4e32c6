"""The text of the stretch that is being decoded: what is certain of it, and what was last heard.

Pure bookkeeping of tokens and positions: what an update said comes in, and what became certain by
it goes out. Where the stretch grows long, its beginning is cut off behind a sentence that is
certain. Positions are encoder positions of 20 ms from the stretch's start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.messages import Pcm
from cluster.model.encoder_context import SAMPLES_PER_POSITION
from cluster.model.text.splitting import split_tokens
from cluster.model.text.tokenizer import WhisperTokenizer
from router.live.interface import TurnSegment
from router.live.policies import Hypothesis, Policy, certain
from router.live.quiet import quietest
from router.live.text import ends_sentence
from router.live.timeline import Stretch, seconds
from router.live.updates import Decoded

MOST_LOOKED_AT = 16  # boundaries between words, of which the quietest is taken
LATEST_FIRST_STAMP = 50  # positions, 1.0 s: the rules let no text begin later


@dataclass(frozen=True, slots=True)
class Certain:
    """A token that is certain. peak: its position; None where none was asked for."""

    token: int
    logprob: float
    peak: int | None


@dataclass(frozen=True, slots=True)
class Boundary:
    """A place between two certain tokens where a sentence ends.

    index: of the first token behind it. first, last: the positions between which to cut.
    """

    index: int
    first: int
    last: int


class Draft:
    """What is known of a stretch's text."""

    def __init__(self, stretch: Stretch, policy: Policy, tokenizer: WhisperTokenizer) -> None:
        self.stretch = stretch
        self.last: Decoded | None = None  # what the last update said behind what is certain
        self.last_end = stretch.start  # where its audio ended, in samples of the session
        self._policy = policy
        self._tokenizer = tokenizer
        self._tokens: list[Certain] = []

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that the next decode must begin with."""
        return tuple(item.token for item in self._tokens)

    @property
    def looked_to(self) -> int:
        """The furthest position of the words that are certain."""
        return max((item.peak for item in self._tokens if item.peak is not None), default=0)

    def take(self, decoded: Decoded, end: int) -> list[Certain]:
        """Take what an update said of the audio up to sample `end`.

        Returns:
            The tokens that became certain.
        """
        self.last_end = end
        if not decoded.is_trusted:
            self.last = None
            return []
        before = self.last.hypothesis if self.last is not None else None
        new = decoded.hypothesis
        n = certain(self._policy, self._tokenizer, new, before, self.looked_to, decoded.language)
        self.last = replace(decoded, hypothesis=new.after(n))
        return self._add(new, n)

    def settle(self, decoded: Decoded) -> list[Certain]:
        """Take all that a last decode said, since no more audio follows."""
        self.last = None
        hypothesis = decoded.hypothesis
        return self._add(hypothesis, len(hypothesis.tokens) if decoded.is_trusted else 0)

    def covers(self, sample: int) -> bool:
        """Whether the last update heard the audio to its end, and is worth believing."""
        return self.last is not None and self.last_end >= sample

    def _add(self, new: Hypothesis, n: int) -> list[Certain]:
        begin = self._tokenizer.special.timestamp_begin
        fresh = [
            Certain(
                token,
                new.logprobs[index],
                new.peaks[index] if new.peaks and token < begin else None,
            )
            for index, token in enumerate(new.tokens[:n])
        ]
        self._tokens += fresh
        return fresh

    def heard_to(self) -> int:
        """The sample up to which the text reaches: its last timestamp, or its last word."""
        begin = self._tokenizer.special.timestamp_begin
        stamps = [item.token - begin for item in self._tokens if item.token >= begin]
        is_closed = bool(self._tokens) and self._tokens[-1].token >= begin
        reach = stamps[-1] if is_closed else max([self.looked_to, *stamps])
        return self.stretch.start + reach * SAMPLES_PER_POSITION

    # -- cutting -----------------------------------------------------------------------------

    def cut(self, audio: Pcm, *, anywhere: bool = False) -> list[TurnSegment]:
        """Cut the stretch's beginning off behind words that are certain, where it is quiet.

        Args:
            audio: the stretch's, from its start on.
            anywhere: between any two words, where no sentence has ended.

        Returns:
            The segments that are cut off; none where there is no such place.
        """
        sentences = self._boundaries(self._ends_sentence)
        found = sentences[-1:] or (self._boundaries(self._begins_word) if anywhere else [])
        places = [
            (
                boundary,
                *quietest(
                    audio,
                    boundary.first * SAMPLES_PER_POSITION,
                    boundary.last * SAMPLES_PER_POSITION,
                ),
            )
            for boundary in found[-MOST_LOOKED_AT:]
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

    def rest(self) -> list[TurnSegment]:
        """The segments of all that is certain, when the stretch has ended."""
        end = self.stretch.end if self.stretch.end is not None else self.last_end
        return self._segments(self._tokens, (end - self.stretch.start) // SAMPLES_PER_POSITION)

    def _boundaries(self, is_one: Callable[[int], bool]) -> list[Boundary]:
        """The places with certain words on both sides that `is_one` accepts, in order."""
        begin = self._tokenizer.special.timestamp_begin
        found = []
        for index in range(1, len(self._tokens)):
            if not is_one(index):
                continue
            first, last = self._peak_before(index), self._peak_from(index)
            if first is not None and last is not None and first < last:
                found.append(Boundary(index, first, last))
                continue
            before, after = (item.token - begin for item in self._tokens[index - 1 : index + 1])
            if 0 <= before <= after and any(i.token < begin for i in self._tokens[index:]):
                found.append(Boundary(index, before, after))
        return found

    def _ends_sentence(self, index: int) -> bool:
        """Whether a sentence ends in front of a token."""
        begin = self._tokenizer.special.timestamp_begin
        before, after = (item.token for item in self._tokens[index - 1 : index + 1])
        if before >= begin or after >= begin:
            return before >= begin and after >= begin
        text = self._tokenizer.decode([item.token for item in self._tokens[:index]])
        return ends_sentence(text) and self._begins_word(index)

    def _begins_word(self, index: int) -> bool:
        return self._tokenizer.decode_bytes([self._tokens[index].token]).startswith(b" ")

    def _peak_before(self, index: int) -> int | None:
        found = [item.peak for item in self._tokens[:index] if item.peak is not None]
        return max(found[-3:], default=None)

    def _peak_from(self, index: int) -> int | None:
        return next((item.peak for item in self._tokens[index:] if item.peak is not None), None)

    def _move(self, at: int) -> None:
        """Begin the stretch `at` positions later."""
        stretch = self.stretch
        stretch.start += at * SAMPLES_PER_POSITION
        stretch.speech = stretch.speech_after(stretch.start) or stretch.speech[-1:]
        if self.last is not None:
            old = self.last.hypothesis
            moved = Hypothesis(
                tuple(self._shifted(token, at) for token in old.tokens),
                old.logprobs,
                tuple(max(0, peak - at) for peak in old.peaks),
                old.end - at,
            )
            self.last = replace(self.last, hypothesis=moved)

    def _restarted(self, kept: Sequence[Certain], at: int) -> list[Certain]:
        """The tokens behind a cut, as a decode of the shorter stretch begins: with a timestamp."""
        begin = self._tokenizer.special.timestamp_begin
        moved = [
            Certain(
                self._shifted(item.token, at),
                item.logprob,
                None if item.peak is None else max(0, item.peak - at),
            )
            for item in kept
        ]
        if moved and moved[0].token >= begin:
            moved[0] = replace(moved[0], token=min(moved[0].token, begin + LATEST_FIRST_STAMP))
        elif moved:
            moved.insert(0, Certain(begin, 0.0, None))
        return moved

    def _shifted(self, token: int, at: int) -> int:
        begin = self._tokenizer.special.timestamp_begin
        return token if token < begin else max(begin, token - at)

    def _segments(self, tokens: Sequence[Certain], end: int) -> list[TurnSegment]:
        """The pieces between timestamps, of tokens of which the last belongs to position `end`."""
        turn, begin = self.stretch.turn, self._tokenizer.special.timestamp_begin
        split = split_tokens([item.token for item in tokens], begin)
        spans = [(piece.start, piece.end, piece.tokens) for piece in split.pieces]
        if split.tail:
            stamped = split.tail[0] >= begin
            spans.append(
                (split.tail[0] - begin if stamped else spans[-1][1] or 0, None, split.tail)
            )
        found = []
        for first, last, piece in spans:
            text = self._tokenizer.decode(piece).strip()
            if piece and piece[0] >= begin:
                first = piece[0] - begin
            last = end if last is None or last < first else min(last, end)
            if text:
                at = [
                    seconds(self.stretch.start + p * SAMPLES_PER_POSITION - turn.start)
                    for p in (min(first, last), last)
                ]
                found.append(TurnSegment(turn.number, text, max(0.0, at[0]), max(0.0, at[1])))
        return found

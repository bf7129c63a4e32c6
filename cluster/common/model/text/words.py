"""Text tokens into words: openai/whisper's rule (`tokenizer.py`, `split_to_word_tokens`).

With spaces between words, a word is what begins with one, and each punctuation mark; without, each
group of whole characters. A window's tokens are cut into segments at its timestamps, also by
openai/whisper's rule (`transcribe.py`): the router makes segments of the pieces, and the decoder
aligns their words. Times are counted in timestamp steps (20 ms) from the window's start.
"""

from __future__ import annotations

import codecs
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.common.model.text.tokenizer import WhisperTokenizer

# Written without spaces between words.
UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


@dataclass(frozen=True, slots=True)
class WordTokens:
    """A word with the space before it, and the tokens that it is made of."""

    text: str
    tokens: tuple[int, ...]


def split_words(
    tokens: Sequence[int], tokenizer: WhisperTokenizer, language: str
) -> list[WordTokens]:
    """Cut text tokens into words; together they are all of `tokens`, in order.

    Bytes that are no character become U+FFFD. Where they begin in one token and end in a later one,
    those stay together; openai/whisper loses its place there, and with it the words behind.
    """
    characters = _split_characters(tokens, tokenizer)
    return characters if language in UNSPACED else _join_at_spaces(characters)


def _split_characters(tokens: Sequence[int], tokenizer: WhisperTokenizer) -> list[WordTokens]:
    """The smallest groups of tokens that cut no character."""
    pieces = [tokenizer.decode_bytes([token]) for token in tokens]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    groups = []
    first = 0
    text = ""
    for i, piece in enumerate(pieces):
        text += decoder.decode(piece)
        begun, _ = decoder.getstate()
        if begun and _continues(begun, b"".join(pieces[i + 1 : i + 4])):
            continue
        text += decoder.decode(b"", final=True)
        groups.append(WordTokens(text, tuple(tokens[first : i + 1])))
        first, text = i + 1, ""
    return groups


def _continues(begun: bytes, rest: bytes) -> bool:
    """Whether `rest` belongs to the character that `begun` is the beginning of."""
    if not rest:
        return False
    together = (begun + rest).decode("utf-8", errors="replace")
    return together != "\ufffd" + rest.decode("utf-8", errors="replace")


def _join_at_spaces(groups: Sequence[WordTokens]) -> list[WordTokens]:
    """A word begins at a space; what is only punctuation is one of its own."""
    words: list[list[WordTokens]] = []
    for group in groups:
        # A substring test, as in the reference: "..." is none of its punctuation, "()" is.
        is_punctuation = group.text.strip() in string.punctuation
        if not words or group.text.startswith(" ") or is_punctuation:
            words.append([group])
        else:
            words[-1].append(group)
    return [joined(word) for word in words]


def joined(groups: Sequence[WordTokens]) -> WordTokens:
    tokens = tuple(token for group in groups for token in group.tokens)
    return WordTokens("".join(group.text for group in groups), tokens)


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment: its tokens, timestamps included, and its bounds in steps.

    end: None where no timestamp closes it: it lasts as long as the window's audio.
    """

    start: int
    end: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """All segments of a window.

    next_start: the step at which a later window begins; None: it was decoded to its end. tail: the
    tokens behind the last closed segment, which belong to none. ends_single: the text ends with one
    timestamp: nothing is said after it. is_cut: there were consecutive timestamps to cut at.
    """

    pieces: tuple[Piece, ...]
    next_start: int | None
    tail: tuple[int, ...]
    ends_single: bool
    is_cut: bool


def split_tokens(tokens: Sequence[int], timestamp_begin: int) -> Split:
    """Cut sampled tokens (without end-of-text) at consecutive timestamps.

    `<0> a <60><70> b <100>` gives (0, 60, a), (70, 100, b), decoded to the end;
    `<0> a <60><70> b` gives (0, 60, a) with the tail `<70> b`, to be decoded again from 60 on;
    `<0> a <60>` and `<0> a` are one piece each, to the last timestamp that is not 0, or open.
    """
    own = tuple(tokens)
    is_stamp = [token >= timestamp_begin for token in own]
    ends_single = is_stamp[-2:] == [False, True]
    cuts = [i for i in range(1, len(own)) if is_stamp[i - 1] and is_stamp[i]]
    if not cuts:
        stamps = [token - timestamp_begin for token in own if token >= timestamp_begin]
        end = stamps[-1] if stamps and stamps[-1] > 0 else None
        return Split((Piece(0, end, own),), None, (), ends_single, is_cut=False)
    if ends_single:
        cuts.append(len(own))
    pieces = []
    first = 0
    for cut in cuts:
        bounds = own[first] - timestamp_begin, own[cut - 1] - timestamp_begin
        pieces.append(Piece(*bounds, own[first:cut]))
        first = cut
    next_start = None if ends_single else own[first - 1] - timestamp_begin
    return Split(tuple(pieces), next_start, own[first:], ends_single, is_cut=True)

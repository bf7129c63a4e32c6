"""Group text tokens into words, and cut a window's tokens into segments at its timestamps, by
openai/whisper's rules (`tokenizer.py`, `split_to_word_tokens`; `transcribe.py`).

Times are counted in timestamp steps (20 ms) from the window's start.
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
    """A word with the space before it, and its tokens."""

    text: str
    tokens: tuple[int, ...]


def split_words(
    tokens: Sequence[int], tokenizer: WhisperTokenizer, language: str
) -> list[WordTokens]:
    """Cut text tokens into words, which together are all of `tokens`, in order.

    Invalid bytes become U+FFFD. Tokens that such bytes span stay together; openai/whisper loses its
    place there, and with it the words after them.
    """
    characters = _split_characters(tokens, tokenizer)
    return characters if language in UNSPACED else _join_at_spaces(characters)


def _split_characters(tokens: Sequence[int], tokenizer: WhisperTokenizer) -> list[WordTokens]:
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
    if not rest:
        return False
    together = (begun + rest).decode("utf-8", errors="replace")
    return together != "\ufffd" + rest.decode("utf-8", errors="replace")


def _join_at_spaces(groups: Sequence[WordTokens]) -> list[WordTokens]:
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
    """A segment, with bounds in steps. `end` is None if no timestamp closes it."""

    start: int
    end: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """The segments of a window.

    `next_start` is the step at which a later window begins; None if this one was decoded to its
    end. `tail` holds the tokens after the last closed segment. `ends_single`: the text ends with
    one timestamp, after which nothing is said. `is_cut`: there were consecutive timestamps.
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

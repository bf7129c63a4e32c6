"""Text tokens into words: openai/whisper's rule (`tokenizer.py`, `split_to_word_tokens`).

A character that is spread over tokens is never cut. What is a word beyond that is a matter of the
language: with spaces, what begins with one, and each punctuation mark; without, each group of
whole characters. Pure bytes and ids, no torch.
"""

from __future__ import annotations

import codecs
import string
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.model.text.tokenizer import WhisperTokenizer

# Written without spaces between words.
_UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})


@dataclass(frozen=True, slots=True)
class WordTokens:
    """A word with the space before it, and the tokens that it is made of."""

    text: str
    tokens: tuple[int, ...]


def split_words(
    tokens: Sequence[int], tokenizer: WhisperTokenizer, language: str
) -> list[WordTokens]:
    """Cut text tokens into words; together they are all of `tokens`, in order.

    Bytes that are no character become U+FFFD. Where they begin in one token and end in a later
    one, those stay together; openai/whisper loses its place there, and with it the words behind.
    """
    characters = _split_characters(tokens, tokenizer)
    return characters if language in _UNSPACED else _join_at_spaces(characters)


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
    """Whether what follows belongs to the character that `begun` is the beginning of."""
    if not rest:
        return False
    together = (begun + rest).decode("utf-8", errors="replace")
    return together != "\ufffd" + rest.decode("utf-8", errors="replace")


def _join_at_spaces(groups: Sequence[WordTokens]) -> list[WordTokens]:
    """A word begins at a space; what is only punctuation is one of its own."""
    words: list[WordTokens] = []
    for group in groups:
        # A substring test, as in the reference: "..." is none of its punctuation, "()" is.
        is_punctuation = group.text.strip() in string.punctuation
        if not words or group.text.startswith(" ") or is_punctuation:
            words.append(group)
        else:
            joined = WordTokens(words[-1].text + group.text, words[-1].tokens + group.tokens)
            words[-1] = joined
    return words

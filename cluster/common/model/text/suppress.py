"""Which tokens a decode may never sample: the checkpoint's lists, else openai/whisper's rule.

The rule (openai/whisper, `tokenizer.py`): symbols that annotate instead of transcribe, such as
brackets and musical notes, are suppressed when they are one token, alone or after a space; of a
musical note the first token is, however many it takes. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.text.vocabulary import Vocabulary

_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *("<<", ">>", "<<<", ">>>", "--", "---", "-(", "-[", "('", '("', "((", "))", "(((", ")))"),
    *("[[", "]]", "{{", "}}", "♪♪", "♪♪♪"),
)
_NOTES = "♩♪♫♬♭♮♯"  # U+2669 to U+266F: the same first bytes
_ONLY_INSIDE_WORDS = ("-", "'")  # suppressed after a space, where they begin a remark

_NEVER_SAMPLED = (
    "<|startoftranscript|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|nocaptions|>",
)

_NON_SPEECH = -1  # in a list: stands for the symbols


def suppress_tokens(checkpoint: Checkpoint, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Ids that no step may sample, ascending.

    An explicit list of the checkpoint is taken as it is, an empty one too.
    """
    listed = _listed(checkpoint, "suppress_tokens")
    if listed is None:
        tokens = set(_non_speech_tokens(vocabulary))
        tokens |= {vocabulary.added[name] for name in _NEVER_SAMPLED if name in vocabulary.added}
        return tuple(sorted(tokens))
    chosen = set(listed)
    if _NON_SPEECH in chosen:
        chosen |= set(_non_speech_tokens(vocabulary))
    return tuple(sorted(token for token in chosen if 0 <= token < checkpoint.dims.n_vocab))


def begin_suppress_tokens(
    checkpoint: Checkpoint, vocabulary: Vocabulary, eot: int
) -> tuple[int, ...]:
    """Ids that the first step may not sample, ascending: the blank and end-of-text."""
    listed = _listed(checkpoint, "begin_suppress_tokens")
    if listed is None:
        listed = [*_encode(vocabulary, " "), eot]
    return tuple(sorted({token for token in listed if 0 <= token < checkpoint.dims.n_vocab}))


def _listed(checkpoint: Checkpoint, key: str) -> list[int] | None:
    """The generation config's list; repositories older than that file keep it in config.json."""
    listed = (checkpoint.generation_config or checkpoint.config).get(key)
    return None if listed is None else [int(token) for token in listed]


def _non_speech_tokens(vocabulary: Vocabulary) -> Iterator[int]:
    for symbol in _ONLY_INSIDE_WORDS:
        yield from _if_one_token(vocabulary, f" {symbol}")
    for symbol in _SYMBOLS:
        yield from _if_one_token(vocabulary, symbol)
        yield from _if_one_token(vocabulary, f" {symbol}")
    for note in _NOTES:
        for text in (note, f" {note}"):
            # In a small vocabulary the space is a token of its own, and must stay.
            yield from (
                token for token in _encode(vocabulary, text)[:1] if vocabulary.pieces[token].strip()
            )


def _if_one_token(vocabulary: Vocabulary, text: str) -> Iterator[int]:
    tokens = _encode(vocabulary, text)
    if len(tokens) == 1:
        yield tokens[0]


def _encode(vocabulary: Vocabulary, text: str) -> list[int]:
    ids: list[int] = vocabulary.bpe.encode(text, add_special_tokens=False).ids
    return ids

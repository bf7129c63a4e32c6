"""Whisper's tokenizer: text to ids and back, and the ids that steer a decode. No torch.

All ids come from the checkpoint's files, since vocabularies differ. A checkpoint without a list of
suppressed tokens gets openai/whisper's (`tokenizer.py`): symbols of annotations, such as brackets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cluster.common.errors import CheckpointError, UnsupportedValueError
from cluster.common.messages import WINDOW_S, Task
from cluster.common.model.checkpoint import Checkpoint
from cluster.common.model.text.languages import LANGUAGES
from cluster.common.model.text.vocabulary import Vocabulary, read_vocabulary

_ENGLISH_ONLY_VOCAB = 51_864  # published sizes; multilingual ones are one or two tokens larger


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the tokens that are not text, under openai/whisper's names."""

    eot: int
    sot: int
    translate: int
    transcribe: int
    sot_lm: int
    sot_prev: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    n_timestamps: int  # 1501 in published checkpoints: 0.00 to 30.00 s in steps of 20 ms
    languages: Mapping[str, int]  # code -> id

    @property
    def timestamp_end(self) -> int:
        return self.timestamp_begin + self.n_timestamps - 1


@dataclass(frozen=True, slots=True)
class WhisperTokenizer:
    """Encodes and decodes text, and builds start sequences.

    A request may name one of `languages`. No step samples `suppress_tokens`, and the first step no
    `begin_suppress_tokens`. `n_vocab` counts rows of the token embedding, padding included.
    """

    special: SpecialTokens
    is_multilingual: bool
    languages: tuple[str, ...]
    suppress_tokens: tuple[int, ...]
    begin_suppress_tokens: tuple[int, ...]
    n_vocab: int
    timestamp_step_s: float
    _vocabulary: Vocabulary = field(repr=False)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> WhisperTokenizer:
        """Raises CheckpointError if tokenizer files or a token that Whisper needs are missing."""
        vocabulary = read_vocabulary(checkpoint.path)
        special = _special_tokens(checkpoint, vocabulary)
        is_multilingual = _is_multilingual(checkpoint, special)
        listed = checkpoint.generation_config.get("languages", special.languages)
        return cls(
            special=special,
            is_multilingual=is_multilingual,
            languages=tuple(listed) if is_multilingual else ("en",),
            suppress_tokens=_suppress_tokens(checkpoint, vocabulary),
            begin_suppress_tokens=_begin_suppress_tokens(checkpoint, vocabulary, special.eot),
            n_vocab=checkpoint.dims.n_vocab,
            timestamp_step_s=WINDOW_S / checkpoint.dims.n_audio_ctx,
            _vocabulary=vocabulary,
        )

    def sot_sequence(self, language: str, task: Task, timestamps: bool) -> tuple[int, ...]:
        """Return the tokens that begin a decode, for example `<|sot|> <|en|> <|transcribe|>`.

        English-only checkpoints take `<|sot|>` alone. Without timestamps, `<|notimestamps|>` ends
        the sequence. Raises UnsupportedValueError if the checkpoint lacks the language or task.
        """
        tokens = [self.special.sot]
        if self.is_multilingual:
            task_token = self.special.translate if task == "translate" else self.special.transcribe
            tokens += [self.language_token(language), task_token]
        elif language != "en":
            raise UnsupportedValueError(
                f"this model transcribes English only, not {language!r}", param="language"
            )
        elif task != "transcribe":
            raise UnsupportedValueError("this English-only model cannot translate", param="task")
        if not timestamps:
            tokens.append(self.special.no_timestamps)
        return tuple(tokens)

    def language_token(self, language: str) -> int:
        try:
            return self.special.languages[language]
        except KeyError:
            known = ", ".join(sorted(self.special.languages))
            raise UnsupportedValueError(
                f"this model has no language {language!r}; it has: {known}", param="language"
            ) from None

    def language_of(self, token: int) -> str | None:
        found = (code for code, own in self.special.languages.items() if own == token)
        return next(found, None)

    def is_timestamp(self, token: int) -> bool:
        return self.special.timestamp_begin <= token <= self.special.timestamp_end

    def encode(self, text: str) -> list[int]:
        """Encode text; names of special tokens in it are text as well."""
        return self._vocabulary.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Skip special tokens and timestamps; an incomplete character becomes U+FFFD."""
        return self.decode_bytes(tokens).decode("utf-8", errors="replace")

    def decode_with_names(self, tokens: Sequence[int]) -> str:
        """Decode with special tokens by name, such as `<|en|>`; timestamps are skipped.

        openai/whisper measures the compression ratio of this text: a failing model samples names.
        """
        pieces, begin = self._vocabulary.pieces, self.special.timestamp_begin
        if all(token >= begin or token in pieces for token in tokens):
            return self.decode(tokens)
        names = {index: content for content, index in self._vocabulary.added.items()}
        parts = []
        for token in tokens:
            if token in pieces:
                parts.append(pieces[token])
            elif token < begin:
                parts.append(names.get(token, "").encode())
        return b"".join(parts).decode("utf-8", errors="replace")

    def decode_bytes(self, tokens: Sequence[int]) -> bytes:
        """Return UTF-8, which may end inside a character."""
        pieces = self._vocabulary.pieces
        return b"".join([pieces.get(token, b"") for token in tokens])


def _special_tokens(checkpoint: Checkpoint, vocabulary: Vocabulary) -> SpecialTokens:
    added = vocabulary.added

    def find(*contents: str) -> int:
        for content in contents:
            if content in added:
                return added[content]
        raise CheckpointError(f"{checkpoint.path}: the tokenizer has no {' or '.join(contents)}")

    no_timestamps = find("<|notimestamps|>")
    # Older tokenizer files end with <|notimestamps|> and leave the timestamps implied.
    timestamp_begin = added.get("<|0.00|>", no_timestamps + 1)
    dims = checkpoint.dims
    special = SpecialTokens(
        eot=find("<|endoftext|>"),
        sot=find("<|startoftranscript|>"),
        translate=find("<|translate|>"),
        transcribe=find("<|transcribe|>"),
        sot_lm=find("<|startoflm|>"),
        sot_prev=find("<|startofprev|>"),
        no_speech=find("<|nospeech|>", "<|nocaptions|>"),
        no_timestamps=no_timestamps,
        timestamp_begin=timestamp_begin,
        n_timestamps=min(dims.n_audio_ctx + 1, dims.n_vocab - timestamp_begin),
        languages=_languages(checkpoint, vocabulary),
    )
    if special.n_timestamps < 1 or max(vocabulary.pieces, default=0) >= dims.n_vocab:
        raise CheckpointError(
            f"{checkpoint.path}: the tokenizer does not fit config.json, whose vocabulary has "
            f"only {dims.n_vocab} tokens"
        )
    return special


def _languages(checkpoint: Checkpoint, vocabulary: Vocabulary) -> dict[str, int]:
    listed = checkpoint.generation_config.get("lang_to_id")
    if listed:
        return {content.strip("<|>"): int(index) for content, index in listed.items()}
    found = {code: vocabulary.added.get(f"<|{code}|>") for code in LANGUAGES}
    return {code: index for code, index in found.items() if index is not None}


def _is_multilingual(checkpoint: Checkpoint, special: SpecialTokens) -> bool:
    said = checkpoint.generation_config.get("is_multilingual")
    if isinstance(said, bool):
        return said
    if checkpoint.generation_config.get("lang_to_id"):
        return True
    forced = checkpoint.config.get("forced_decoder_ids")
    if forced:
        return any(token in special.languages.values() for _, token in forced)
    return checkpoint.dims.n_vocab != _ENGLISH_ONLY_VOCAB


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


def _suppress_tokens(checkpoint: Checkpoint, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return ascending ids; a list of the checkpoint is used as it is, even an empty one."""
    chosen = _listed(checkpoint, "suppress_tokens")
    if chosen is None:
        chosen = {_NON_SPEECH}
        chosen |= {vocabulary.added[name] for name in _NEVER_SAMPLED if name in vocabulary.added}
    if _NON_SPEECH in chosen:
        chosen |= set(_non_speech_tokens(vocabulary))
    return tuple(sorted(token for token in chosen if 0 <= token < checkpoint.dims.n_vocab))


def _begin_suppress_tokens(
    checkpoint: Checkpoint, vocabulary: Vocabulary, eot: int
) -> tuple[int, ...]:
    listed = _listed(checkpoint, "begin_suppress_tokens")
    chosen = {*vocabulary.encode(" "), eot} if listed is None else listed
    return tuple(sorted(token for token in chosen if 0 <= token < checkpoint.dims.n_vocab))


def _listed(checkpoint: Checkpoint, key: str) -> set[int] | None:
    """Read a list of tokens from the generation config, or from config.json without that file."""
    listed = (checkpoint.generation_config or checkpoint.config).get(key)
    return None if listed is None else {int(token) for token in listed}


def _non_speech_tokens(vocabulary: Vocabulary) -> Iterator[int]:
    alone = [f" {symbol}" for symbol in _ONLY_INSIDE_WORDS]
    alone += [text for symbol in _SYMBOLS for text in (symbol, f" {symbol}")]
    for text in alone:
        tokens = vocabulary.encode(text)
        if len(tokens) == 1:
            yield tokens[0]
    for note in _NOTES:
        for text in (note, f" {note}"):
            # In a small vocabulary the space is a token of its own, and must stay.
            yield from (
                token for token in vocabulary.encode(text)[:1] if vocabulary.pieces[token].strip()
            )

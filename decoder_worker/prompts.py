"""What a decode begins with: the start sequence, with context before it and a prefix behind it.

Checks what a request asks for against the checkpoint. Knows no rows and no pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cluster.common.errors import UnsupportedValueError
from cluster.common.messages import DecodeOptions
from cluster.common.model.dims import ModelDims
from cluster.common.model.text.tokenizer import WhisperTokenizer

SOT_TOKENS = 3  # start of transcript, language, task: the longest start sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens before the first sampled one; `sot` is where `<|startoftranscript|>` stands."""

    tokens: tuple[int, ...]
    sot: int


NO_PROMPT = Prompt((), 0)


class PromptBuilder:
    def __init__(self, tokenizer: WhisperTokenizer, dims: ModelDims) -> None:
        self._tokenizer = tokenizer
        self._dims = dims

    @property
    def eot(self) -> int:
        return self._tokenizer.special.eot

    @property
    def timestamp_begin(self) -> int:
        return self._tokenizer.special.timestamp_begin

    def language_of(self, token: int) -> str | None:
        return self._tokenizer.language_of(token)

    def text_of(self, tokens: Sequence[int]) -> str:
        """As openai/whisper measures its compression."""
        return self._tokenizer.decode_with_names(tokens).strip()

    def check(self, options: DecodeOptions) -> None:
        """Raise UnsupportedValueError, naming the field, when the model cannot do this."""
        language = options.language or self.any_language
        for code in (language, *options.languages):
            self._tokenizer.sot_sequence(code, options.task, options.timestamps)
        n_vocab = self._tokenizer.n_vocab
        wrong = [token for token in options.prompt_tokens if not 0 <= token < n_vocab]
        if wrong:
            raise UnsupportedValueError(
                f"prompt token {wrong[0]} is not in the vocabulary of {n_vocab}", param="prompt"
            )
        if not options.temperatures or not all(0.0 <= t < inf for t in options.temperatures):
            raise UnsupportedValueError(
                f"temperatures must be 0 or above, got {options.temperatures}", param="temperature"
            )
        for name in ("beam_size", "best_of"):
            if getattr(options, name) < 1:
                raise UnsupportedValueError(
                    f"{name} must be at least 1, got {getattr(options, name)}", param=name
                )
        if not 0 < options.patience < inf:
            raise UnsupportedValueError(
                f"patience must be above 0, got {options.patience}", param="patience"
            )
        if options.max_new_tokens is not None and options.max_new_tokens < 1:
            raise UnsupportedValueError(
                f"max_new_tokens must be at least 1, got {options.max_new_tokens}"
            )
        if options.prefix_tokens:
            self._check_prefix(options, language)
        if options.known_text:
            self._check_known(options)

    def _check_known(self, options: DecodeOptions) -> None:
        """Text alone, with room for a start sequence, <|notimestamps|> and the end around it."""
        known = options.known_text
        if any(not 0 <= token < self.eot for token in known):
            raise UnsupportedValueError("a known text has text tokens alone", param="text")
        most = self._dims.n_text_ctx - SOT_TOKENS - 2
        if len(known) > most:
            raise UnsupportedValueError(
                f"the text of a window has {len(known)} tokens, more than the {most} that fit",
                param="text",
            )

    def _check_prefix(self, options: DecodeOptions, language: str) -> None:
        """What may have been sampled, with room for a token behind it, in half the text context."""
        prefix, n_vocab = options.prefix_tokens, self._tokenizer.n_vocab
        wrong = [token for token in prefix if not 0 <= token < n_vocab]
        if wrong:
            raise UnsupportedValueError(
                f"prefix token {wrong[0]} is not in the vocabulary of {n_vocab}", param="prefix"
            )
        if self.eot in prefix:
            raise UnsupportedValueError("nothing can follow a prefix with its end", param="prefix")
        most = self._dims.n_text_ctx // 2
        if len(prefix) > most:
            raise UnsupportedValueError(
                f"the prefix has {len(prefix)} tokens, more than the {most} of a window's text",
                param="prefix",
            )
        if self.n_new_max(options) < 1:
            n_others = len(self.prompt(options, language).tokens) - len(prefix)
            raise UnsupportedValueError(
                f"{len(prefix)} tokens of prefix and {n_others} before them leave no room in the "
                f"text context of {self._dims.n_text_ctx}: shorten the prompt or the prefix",
                param="prefix",
            )

    def known_language(self, options: DecodeOptions) -> str | None:
        """What need not be detected: the language asked for, or the only one there is."""
        if options.language is None and not self._tokenizer.is_multilingual:
            return self.any_language
        return options.language

    def n_new_max(self, options: DecodeOptions) -> int:
        """Tokens that may be sampled; the last one is never fed, so it needs no position."""
        prompt = self.prompt(options, options.language or self.any_language)
        wanted = options.max_new_tokens or self._dims.n_text_ctx // 2
        if options.words:
            # Their alignment feeds them between a start sequence, <|notimestamps|> and the end.
            n_prefix = sum(token < self.eot for token in options.prefix_tokens)
            wanted = min(wanted, self._dims.n_text_ctx - SOT_TOKENS - 2 - n_prefix)
        return min(wanted, self._dims.n_text_ctx + 1 - len(prompt.tokens))

    def prompt(self, options: DecodeOptions, language: str) -> Prompt:
        """Earlier context (its last 223 tokens of 448 positions), start sequence, and prefix."""
        start = self._tokenizer.sot_sequence(language, options.task, options.timestamps)
        start = (*start, *options.prefix_tokens)
        if not options.prompt_tokens:
            return Prompt(start, sot=0)
        n_context = self._dims.n_text_ctx // 2 - 1
        context = options.prompt_tokens[-n_context:]
        before = (self._tokenizer.special.sot_prev, *context)
        return Prompt((*before, *start), sot=len(before))

    @property
    def any_language(self) -> str:
        return self._tokenizer.languages[0]

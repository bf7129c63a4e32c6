"""Builds prompts (context, start sequence, prefix) and checks requests against the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from cluster.common.errors import UnsupportedValueError
from cluster.common.messages import DecodeOptions
from cluster.common.model.dims import ModelDims
from cluster.common.model.text.tokenizer import WhisperTokenizer

SOT_TOKENS = 3  # start of transcript, language, task: the longest start sequence


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens before the first sampled one; `sot` is the index of `<|startoftranscript|>`."""

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
        return self._tokenizer.decode_with_names(tokens).strip()  # as openai/whisper

    def check(self, options: DecodeOptions) -> None:
        """Raise UnsupportedValueError, naming the field, if the model cannot do this."""
        language = options.language or self.any_language
        for code in (language, *options.languages):
            self._tokenizer.sot_sequence(code, options.task, options.timestamps)
        n_vocab, n_text_ctx = self._tokenizer.n_vocab, self._dims.n_text_ctx
        prefix, known = options.prefix_tokens, options.known_text
        for param, tokens, behind in (
            ("prompt", options.prompt_tokens, n_vocab),
            ("prefix", prefix, n_vocab),
            ("text", known, self.eot),
        ):
            if wrong := [token for token in tokens if not 0 <= token < behind]:
                _refuse(f"{param} token {wrong[0]} is not in the vocabulary of {behind}", param)
        if self.eot in prefix:
            _refuse("nothing can follow a prefix with its end", "prefix")
        # Half the text context, and what a start sequence, <|notimestamps|> and the end leave.
        for param, tokens, most in (
            ("prefix", prefix, n_text_ctx // 2),
            ("text", known, n_text_ctx - SOT_TOKENS - 2),
        ):
            if (n := len(tokens)) > most:
                _refuse(
                    f"the window's {param} has {n} tokens, more than the {most} that fit", param
                )
        if prefix and self.n_new_max(options) < 1:
            n_others = len(self.prompt(options, language).tokens) - len(prefix)
            _refuse(
                f"{len(prefix)} tokens of prefix and {n_others} before them leave no room in the "
                f"text context of {n_text_ctx}: shorten the prompt or the prefix",
                "prefix",
            )

    def known_language(self, options: DecodeOptions) -> str | None:
        """The language asked for, or the only one; None if it has to be detected."""
        if options.language is None and not self._tokenizer.is_multilingual:
            return self.any_language
        return options.language

    def n_new_max(self, options: DecodeOptions) -> int:
        """The most tokens to sample; the last one is never fed, so it needs no position."""
        prompt = self.prompt(options, options.language or self.any_language)
        wanted = options.max_new_tokens or self._dims.n_text_ctx // 2
        if options.words:
            # Their alignment feeds them between a start sequence, <|notimestamps|> and the end.
            n_prefix = sum(token < self.eot for token in options.prefix_tokens)
            wanted = min(wanted, self._dims.n_text_ctx - SOT_TOKENS - 2 - n_prefix)
        return min(wanted, self._dims.n_text_ctx + 1 - len(prompt.tokens))

    def prompt(self, options: DecodeOptions, language: str) -> Prompt:
        """Context (its last 223 tokens of 448 positions), start sequence, and prefix."""
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


def _refuse(why: str, param: str) -> NoReturn:
    raise UnsupportedValueError(why, param=param)

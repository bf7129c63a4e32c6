"""The text before a window, as the decoder gets it: openai/whisper's rules.

Knows tokens and their order. In sequential mode text is added as it is decoded; what counts, and
when it is forgotten, `router.seeking` decides. Hotwords stand in front, as faster-whisper has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.common.model.text.tokenizer import WhisperTokenizer


class TextContext:
    """All text tokens of a request so far, and how many of them a window may see.

    n_room: context tokens that a prompt has room for: half of the decoder's positions, less the
        token that begins them.
    carried: the initial prompt is in front of every window's context and not of the first's alone.
    """

    def __init__(
        self,
        tokenizer: WhisperTokenizer,
        n_text_ctx: int,
        *,
        prompt: str | None = None,
        hotwords: str | None = None,
        carried: bool = False,
    ) -> None:
        n_room = n_text_ctx // 2 - 1
        self._hotwords = _encode(tokenizer, hotwords)[:n_room]
        self._n_room = n_room - len(self._hotwords)
        self._initial = _encode(tokenizer, prompt)
        self._carried = carried
        self._tokens = list(self._initial)
        self._seen_from = 0  # tokens before are forgotten

    def prompt_tokens(self) -> tuple[int, ...]:
        """What the next window's decode begins with; where room is short, its end."""
        context = self._tokens[self._seen_from :]
        if self._carried:
            later = self._tokens[max(len(self._initial), self._seen_from) :]
            # As in openai/whisper: a prompt that takes all the room leaves it, from its start on,
            # to what was said since.
            context = self._initial + later[-(self._n_room - len(self._initial)) :]
        return (*self._hotwords, *(context[-self._n_room :] if self._n_room else ()))

    def add(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def forget(self) -> None:
        """Let no window see what was added so far, but for what is carried."""
        self._seen_from = len(self._tokens)


def _encode(tokenizer: WhisperTokenizer, text: str | None) -> list[int]:
    stripped = (text or "").strip()
    return tokenizer.encode(f" {stripped}") if stripped else []

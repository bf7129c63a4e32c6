"""The text of a turn: confirmed tokens come in, deltas go out, and no delta is ever taken back.

A delta holds whole characters only. The text of a turn has no space at its beginning and its end,
as in a transcript: a space at the end of one delta is sent with the next.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from cluster.model.text.tokenizer import WhisperTokenizer
from router.live.interface import TextDelta
from router.transcript import TokenLogprob

SENTENCE_ENDS = ".?!…。?!।۔"
_QUOTES = "\"'”’»)]}』」"  # may follow the end of a sentence


class TurnText:
    """The confirmed text of a turn.

    emitted: all deltas so far, joined. logprobs: of the tokens of `emitted`, if asked for.
    """

    def __init__(self, tokenizer: WhisperTokenizer, *, logprobs: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.with_logprobs = logprobs
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is not emitted yet
        self._space = ""
        self.emitted = ""
        self.logprobs: list[TokenLogprob] = []

    def add(self, turn: int, tokens: Sequence[int], logprobs: Sequence[float]) -> TextDelta | None:
        """Take the next tokens, which may hold timestamps. None if they give no text to emit.

        Args:
            turn: the turn's number, for the delta.
            logprobs: of each of `tokens`.
        """
        if self.with_logprobs:
            for token, logprob in zip(tokens, logprobs, strict=True):
                if content := self._tokenizer.decode_bytes([token]):
                    shown = content.decode("utf-8", errors="replace")
                    self._waiting.append(TokenLogprob(shown, logprob, tuple(content)))
        return self._delta(turn, self._decoder.decode(self._tokenizer.decode_bytes(tokens)))

    def finish(self, turn: int) -> TextDelta | None:
        """The last delta of the turn, for a character whose bytes never came in full."""
        return self._delta(turn, self._decoder.decode(b"", final=True))

    def _delta(self, turn: int, text: str) -> TextDelta | None:
        fresh = self._space + text
        if not self.emitted:
            fresh = fresh.lstrip()
        shown = fresh.rstrip()
        self._space = fresh[len(shown) :]
        if not shown:
            return None
        self.emitted += shown
        logprobs = tuple(self._waiting)
        self._waiting.clear()
        self.logprobs += logprobs
        return TextDelta(turn, shown, logprobs)


def ends_sentence(text: str) -> bool:
    """Whether a text ends with the end of a sentence."""
    return text.rstrip().rstrip(_QUOTES).endswith(tuple(SENTENCE_ENDS))

"""The text of a turn as it becomes certain: tokens in, deltas out, nothing taken back.

A delta holds whole characters only, and a turn's text begins and ends without a space, as a
transcript does: a space at the end of one delta waits for the next.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from cluster.model.text.tokenizer import WhisperTokenizer
from router.live.interface import TextDelta
from router.transcript import TokenLogprob

SENTENCE_ENDS = ".?!…。?!।۔"
_QUOTES = "\"'”’»)]}』」"  # may stand behind the end of a sentence


class TurnText:
    """What is certain of a turn's text."""

    def __init__(self, tokenizer: WhisperTokenizer, *, logprobs: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.tells_logprobs = logprobs
        self._waiting: list[TokenLogprob] = []  # of tokens whose text is not told yet
        self._space = ""
        self.told = ""
        self.logprobs: list[TokenLogprob] = []

    def add(self, turn: int, tokens: Sequence[int], logprobs: Sequence[float]) -> TextDelta | None:
        """Take the next tokens, timestamps perhaps among them; None where no text came of them.

        Args:
            turn: the turn's number, for the delta.
            logprobs: of each of `tokens`.
        """
        if self.tells_logprobs:
            for token, logprob in zip(tokens, logprobs, strict=True):
                if content := self._tokenizer.decode_bytes([token]):
                    shown = content.decode("utf-8", errors="replace")
                    self._waiting.append(TokenLogprob(shown, logprob, tuple(content)))
        return self._tell(turn, self._decoder.decode(self._tokenizer.decode_bytes(tokens)))

    def finish(self, turn: int) -> TextDelta | None:
        """What is left of a character that was never completed."""
        return self._tell(turn, self._decoder.decode(b"", final=True))

    def _tell(self, turn: int, text: str) -> TextDelta | None:
        fresh = self._space + text
        if not self.told:
            fresh = fresh.lstrip()
        shown = fresh.rstrip()
        self._space = fresh[len(shown) :]
        if not shown:
            return None
        self.told += shown
        logprobs = tuple(self._waiting)
        self._waiting.clear()
        self.logprobs += logprobs
        return TextDelta(turn, shown, logprobs)


def ends_sentence(text: str) -> bool:
    """Whether a text ends where a sentence does."""
    return text.rstrip().rstrip(_QUOTES).endswith(tuple(SENTENCE_ENDS))

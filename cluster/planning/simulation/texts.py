"""The tokens that a simulated decoder gives: as many as a request has, between its timestamps.

They are tokens as a real window has them, so that the router's own code makes segments of them: a
timestamp at the start, words, and one at the end of the audio. The words do not repeat themselves,
since the decoder tries text that does again at another temperature.
"""

from __future__ import annotations

from functools import cache
from random import Random

from cluster.model.text.tokenizer import WhisperTokenizer
from cluster.planning.scenario.arrivals import Traffic
from decoder_worker.sampling.search import Row, StepOutput
from decoder_worker.scheduling.sequence import DecodeSequence

LOGPROB = -0.1
LANGUAGE = "en"
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"
N_WORDS, LONGEST_WORD = 400, 4  # a window has at most 224 tokens; syllables
MEL_PER_STEP = 2  # mel frames in a timestamp's step of 20 ms


@cache
def _words() -> str:
    """Made-up words, the same ones each time."""
    chance = Random(0)

    def word() -> str:
        syllables = chance.randint(1, LONGEST_WORD)
        return "".join(chance.choice(CONSONANTS) + chance.choice(VOWELS) for _ in range(syllables))

    return "".join(f" {word()}" for _ in range(N_WORDS))


class Texts:
    """What each row of one decoder gets next."""

    def __init__(self, tokenizer: WhisperTokenizer, traffic: Traffic) -> None:
        self._traffic = traffic
        self._n_tokens: dict[int, int] = {}  # of the sequence that holds a slot
        special = tokenizer.special
        language = special.languages.get(LANGUAGE, special.eot)
        self.language = StepOutput(language, LOGPROB)
        self._begin = StepOutput(special.timestamp_begin, LOGPROB)
        self._end = StepOutput(special.eot, LOGPROB)
        self._words = [StepOutput(token, LOGPROB) for token in tokenizer.encode(_words())]
        self._stamps = [StepOutput(special.timestamp_begin + n, LOGPROB) for n in range(1501)]

    def next_output(self, sequence: DecodeSequence, row: Row) -> StepOutput:
        """One of `n_tokens` in all, or the end behind them."""
        n_given, slot = len(row.tokens), sequence.rows[0].slot
        if n_given == 0:
            request = sequence.request
            n_text = self._traffic.tokens_of(request.request_id, request.content_frames)
            self._n_tokens[slot] = min(n_text, sequence.n_new_max)
        n_tokens = self._n_tokens[slot]
        if n_given >= n_tokens:
            return self._end
        if n_given == 0:
            return self._begin
        if n_given == n_tokens - 1:
            return self._stamps[sequence.request.content_frames // MEL_PER_STEP]
        return self._words[n_given % len(self._words)]

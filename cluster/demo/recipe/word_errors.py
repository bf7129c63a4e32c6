"""Word errors by the alignment that has the fewest: the one definition for recipe and benchmarks.

The alignment is jiwer's. Texts come normalised: how to normalise differs from one use to another.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import jiwer


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Of one text, or summed over several; `words` are those that were said."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(
            self.words + other.words,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )

    @property
    def errors(self) -> int:
        """All three kinds together."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """In percent of the words said; more than 100 where more was invented than said."""
        return 100 * self.errors / max(1, self.words)


def count_errors(said: str, heard: str) -> WordErrors:
    """The errors of one text; both are normalised."""
    found = jiwer.process_words(said, heard)
    return WordErrors(len(said.split()), found.substitutions, found.deletions, found.insertions)


def total(counted: Iterable[WordErrors]) -> WordErrors:
    """The sum, from which the rate of all of them is taken."""
    return sum(counted, WordErrors())

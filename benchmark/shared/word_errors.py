"""Word error rates after Whisper's normaliser, with intervals by a bootstrap over clips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jiwer
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

N_RESAMPLES = 5000


@dataclass(frozen=True, slots=True)
class WordErrors:
    """Errors of one text, or summed over several; `words` counts those that were said."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: WordErrors) -> WordErrors:
        return WordErrors(
            self.words + other.words,
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
        )

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def wer(self) -> float:
        """Errors in percent of the words that were said; it may exceed 100."""
        return 100 * self.errors / max(1, self.words)


def count_errors(said: str, heard: str) -> WordErrors:
    if not said:
        return WordErrors(insertions=len(heard.split()))
    found = jiwer.process_words(said, heard)
    return WordErrors(len(said.split()), found.substitutions, found.deletions, found.insertions)


def count_by_speaker(said: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """Count errors for cpWER: speakers are assigned so that the errors are fewest."""
    n = max(len(said), len(heard))
    said, heard = ([*texts, *[""] * (n - len(texts))] for texts in (said, heard))
    found = [[count_errors(one, other) for other in heard] for one in said]
    pairs = linear_sum_assignment([[one.errors for one in row] for row in found])
    return total(found[i][j] for i, j in zip(*pairs, strict=True))


def total(counted: Iterable[WordErrors]) -> WordErrors:
    return sum(counted, WordErrors())


def normaliser(language: str | None) -> Callable[[str], str]:
    from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer  # imports torch

    normalise: Callable[[str], str] = (
        EnglishTextNormalizer() if language in (None, "en") else BasicTextNormalizer()
    )
    return normalise


def count(reference: str, heard: str | None, normalise: Callable[[str], str]) -> WordErrors:
    return count_errors(normalise(reference), normalise(heard or ""))


def count_all(
    references: Sequence[str], heard: Sequence[str | None], language: str | None
) -> list[WordErrors]:
    normalise = normaliser(language or None)
    return [count(said, text, normalise) for said, text in zip(references, heard, strict=True)]


def interval(counted: Sequence[WordErrors]) -> tuple[float, float]:
    """Return the 95 % interval of the word error rate, in percent."""
    rates = _resampled(_array(counted))
    return _bounds(rates[:, 0])


def difference(
    ours: Sequence[WordErrors], baseline: Sequence[WordErrors]
) -> tuple[float, float, float]:
    """Return the points by which `ours` is above `baseline`, and their 95 % interval."""
    rates = _resampled(np.concatenate([_array(ours), _array(baseline)[:, :1]], axis=1))
    return (total(ours).wer - total(baseline).wer, *_bounds(rates[:, 0] - rates[:, 1]))


def _array(counted: Sequence[WordErrors]) -> NDArray[np.float64]:
    return np.array([(c.errors, c.words) for c in counted], dtype=np.float64)


def _resampled(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return rates in percent of resampled clips; column 1 has the words, the others errors."""
    rng = np.random.default_rng(0)
    n = len(columns)
    drawn = rng.multinomial(n, np.full(n, 1 / n), size=N_RESAMPLES).astype(np.float64)
    sums = drawn @ columns
    words = np.maximum(1.0, sums[:, 1:2])
    rates: NDArray[np.float64] = 100 * np.delete(sums, 1, axis=1) / words
    return rates


def _bounds(rates: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(rates, (2.5, 97.5))
    return float(low), float(high)

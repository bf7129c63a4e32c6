"""Word errors and segment times of transcripts, counted over a set of windows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.demo.recipe.examples import Example

SegmentTimes = tuple[float, float]  # start and end in s


@dataclass(slots=True)
class Score:
    """Errors over one set."""

    errors: int = 0
    words: int = 0
    windows: int = 0
    exact: int = 0
    answered: int = 0  # windows whose text is not empty
    matched: int = 0  # windows with as many segments as there were sentences
    start_gaps_s: list[float] = field(default_factory=list)
    end_gaps_s: list[float] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def wer(self) -> float:
        """Word errors in percent of the words said."""
        return 100 * self.errors / max(1, self.words)

    def add(self, example: Example, text: str, segments: Sequence[SegmentTimes] = ()) -> None:
        """Count one window; its segments are compared with the sentences in order, one by one."""
        errors, words = error_counts(example.text, text)
        self.errors += errors
        self.words += words
        self.windows += 1
        self.exact += errors == 0
        self.answered += bool(words_of(text))
        if errors:
            self.wrong.append((example.text, text))
        if example.segments and len(segments) == len(example.segments):
            self.matched += 1
            for (start, end), (said_start, said_end, _) in zip(
                segments, example.segments, strict=True
            ):
                self.start_gaps_s.append(abs(start - said_start))
                self.end_gaps_s.append(abs(end - said_end))


def words_of(text: str) -> list[str]:
    """Normalised: lowercase, no punctuation."""
    return "".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split()


def error_counts(reference: str, heard: str) -> tuple[int, int]:
    """Word errors (Levenshtein) and words of the reference."""
    said, got = words_of(reference), words_of(heard)
    row = list(range(len(got) + 1))
    for i, word in enumerate(said, start=1):
        last, row[0] = row[0], i
        for j, other in enumerate(got, start=1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (word != other))
    return row[-1], len(said)

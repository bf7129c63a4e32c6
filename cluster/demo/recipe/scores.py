"""Word errors and segment times of transcripts, counted over a set of windows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.demo.recipe.examples import Example
from cluster.demo.recipe.word_errors import WordErrors, count_errors
from cluster.demo.samples import words_of

SegmentTimes = tuple[float, float]  # start and end in s


@dataclass(slots=True)
class Score:
    """Errors over one set.

    answered: windows whose text is not empty; matched: windows with as many segments as there were
    sentences; wrong: what was said and what was heard, where they differ.
    """

    errors: WordErrors = field(default_factory=WordErrors)
    windows: int = 0
    answered: int = 0
    matched: int = 0
    start_gaps_s: list[float] = field(default_factory=list)
    end_gaps_s: list[float] = field(default_factory=list)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def add(self, example: Example, text: str, segments: Sequence[SegmentTimes] = ()) -> None:
        """Count one window; its segments are compared with the sentences in order, one by one."""
        errors = errors_of(example.text, text)
        self.errors += errors
        self.windows += 1
        self.answered += bool(words_of(text))
        if errors.errors:
            self.wrong.append((example.text, text))
        if example.segments and len(segments) == len(example.segments):
            self.matched += 1
            for (start, end), (said_start, said_end, _) in zip(
                segments, example.segments, strict=True
            ):
                self.start_gaps_s.append(abs(start - said_start))
                self.end_gaps_s.append(abs(end - said_end))


def errors_of(said: str, heard: str) -> WordErrors:
    """Word errors of the demo model's text: in lowercase, without punctuation."""
    return count_errors(" ".join(words_of(said)), " ".join(words_of(heard)))

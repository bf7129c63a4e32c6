"""When each word of a talk was told, for whoever told it: delays and word errors.

A word counts where it was heard right: its delay is from its true end to the delta that ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from benchmark.shared.talks import Talk

Told = tuple[float, str, str]  # seconds since the first sample was due, item, text that is added


def word_delays(talk: Talk, deltas: Iterable[Told]) -> list[float]:
    """Seconds from each word's end to its delta, of the words that were heard right."""
    import jiwer

    said = [_plain(word) for word, _ in talk.words]
    told: list[tuple[str, float]] = []
    open_words: dict[str, str] = {}
    for at_s, item, text in deltas:
        joined = open_words.get(item, "") + text
        open_words[item] = joined[len(joined.rstrip()) :] if joined != joined.rstrip() else ""
        told += [(_plain(word), at_s) for word in joined.split() if _plain(word)]
    if not told or not said:
        return []
    aligned = jiwer.process_words(" ".join(said), " ".join(word for word, _ in told))
    delays = []
    for chunk in aligned.alignments[0]:
        if chunk.type == "equal":
            for ref in range(chunk.ref_start_idx, chunk.ref_end_idx):
                hyp = chunk.hyp_start_idx + ref - chunk.ref_start_idx
                delays.append(told[hyp][1] - talk.words[ref][1])
    return delays


def percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else float("nan")


def _plain(word: str) -> str:
    return "".join(char for char in word.lower() if char.isalnum() or char == "'")

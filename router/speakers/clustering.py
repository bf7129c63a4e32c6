"""Which windows of speech are of one voice: clusters of vectors, and who speaks at each moment.

Agglomerative, by the mean cosine between clusters, in two levels: at most `MOST_AT_ONCE` vectors at
once, then the means of what was found. A second pass gives every window to the nearest voice, with
its neighbours' help, and moves the borders between them. Knows vectors and samples, nothing of
audio or of names.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.optimize import linear_sum_assignment

from router.speakers.embedding import Vectors

MOST_AT_ONCE = 800  # of which a linkage takes 20 ms; all of 10 hours would need 9 GB
LEAST_SHARE, LEAST_WINDOWS = 0.06, 5  # of a voice: fewer windows are noise, or two at once
MOST_SMALL = 16  # clusters beside the voices, where their count is given
ROUNDS = 3  # of the second pass
NEIGHBOUR = 0.5  # weight of a window's neighbours in its own stretch of speech

Labels = NDArray[np.int64]  # [n], from 0


@dataclass(frozen=True, slots=True)
class Count:
    """How many voices there may be. threshold: cosine distance that parts two of them."""

    least: int = 1
    most: int | None = None
    threshold: float = 0.65


@dataclass(frozen=True, slots=True)
class Stretch:
    """Speech without a pause, in samples, and the middles of its windows; it may have none."""

    start: int
    end: int
    middles: tuple[int, ...]


def cluster(vectors: Vectors, count: Count) -> Generator[None, None, Labels]:
    """The voice of each vector, after the first level alone: yields between steps."""
    n = vectors.shape[0]
    labels = np.zeros(n, np.int64)
    means: list[NDArray[np.float32]] = []
    pieces = max(1, -(-n // MOST_AT_ONCE))
    for piece in np.array_split(np.arange(n), pieces):
        alone = count if pieces == 1 else Count(threshold=count.threshold)
        found = _agglomerate(vectors[piece], np.ones(piece.shape[0]), alone)
        labels[piece] = found + len(means)
        means += list(_means(vectors[piece], found))
        yield None
    if pieces > 1:
        labels = _agglomerate(np.stack(means), np.bincount(labels), count)[labels]
    return labels


def _agglomerate(vectors: Vectors, weights: NDArray[Any], count: Count) -> Labels:
    """Of at most a few thousand vectors; weights: the windows that each stands for, [n].

    Where the count has bounds, the fewest clusters of which so many have enough windows.
    """
    n = vectors.shape[0]
    if n < 2:
        return np.zeros(n, np.int64)
    tree = linkage(vectors, "average", "cosine")
    found: Labels = fcluster(tree, count.threshold, "distance").astype(np.int64) - 1
    n_large = _n_large(np.bincount(found, weights))
    wanted = min(max(n_large, count.least), count.most or n)
    if wanted == n_large:
        return found
    for n_clusters in (*range(wanted, min(n, wanted + MOST_SMALL) + 1), wanted):
        found = fcluster(tree, n_clusters, "maxclust").astype(np.int64) - 1
        if _n_large(np.bincount(found, weights)) == wanted:
            break
    return found


def _n_large(sizes: NDArray[Any]) -> int:
    """How many clusters have windows enough for a voice."""
    fewest = min(LEAST_WINDOWS, max(1, round(LEAST_SHARE * sizes.sum())))
    return max(1, int((sizes >= fewest).sum()))


def _means(vectors: Vectors, labels: Labels) -> Vectors:
    """The direction of each voice, [n_voices, size]."""
    sums = np.zeros((int(labels.max()) + 1, vectors.shape[1]), np.float32)
    np.add.at(sums, labels, vectors)
    return _directions(sums)


def _directions(sums: NDArray[np.float32]) -> Vectors:
    """Each of length 1."""
    found: Vectors = sums / np.maximum(1e-9, np.linalg.norm(sums, axis=1, keepdims=True))
    return found


Turn = tuple[int, int, int]  # first sample, end, number of the speaker


def find_turns(
    vectors: Vectors, stretches: Sequence[Stretch], count: Count, known: Sequence[Vectors] = ()
) -> Generator[None, None, list[Turn]]:
    """Who speaks when, in time order; yields between steps.

    vectors: [n, size], one for each of the stretches' windows. known: voices, [size] each, which
    are the speakers 0, 1, ...; others follow in the order in which they appear.
    """
    if not vectors.shape[0]:
        return [(stretch.start, stretch.end, len(known)) for stretch in stretches]
    begins = np.zeros(vectors.shape[0], bool)  # of a stretch: what is before is no neighbour
    begins[[at for at in _starts(stretches) if at < begins.shape[0]]] = True
    smoothed = _with_neighbours(vectors, begins)
    labels = yield from cluster(_directions(smoothed), count)
    scores, voices = settle(vectors, labels, begins, count)
    yield None
    numbers = _recognised(voices, known, 1 - count.threshold)
    turns: list[Turn] = []
    at = 0
    for stretch in stretches:
        own = scores[at : at + len(stretch.middles)]
        at += len(stretch.middles)
        for start, end, voice in _parts(stretch, own, turns[-1][2] if turns else None):
            turns.append((start, end, voice))
    return _numbered(turns, numbers, len(known))


def _parts(stretch: Stretch, scores: NDArray[np.float32], before: int | None) -> Iterator[Turn]:
    """The stretch, parted where one voice becomes less near than the next, by voice.

    A stretch without windows goes on with the voice before it.
    """
    start = stretch.start
    nearest = scores.argmax(axis=1).tolist() if stretch.middles else [before or 0]
    for i, (voice, following) in enumerate(pairwise(nearest)):
        if voice != following:
            lead = float(scores[i, voice] - scores[i, following])
            lag = float(scores[i + 1, following] - scores[i + 1, voice])
            first, last = stretch.middles[i : i + 2]
            end = first + round((last - first) * lead / max(1e-9, lead + lag))
            yield start, end, voice
            start = end
    yield start, stretch.end, nearest[-1]


def _recognised(voices: Vectors, known: Sequence[Vectors], least_cosine: float) -> dict[int, int]:
    """From a voice to the known one that it is: one to one, the nearest pairs of all."""
    if not known:
        return {}
    cosines = voices @ np.stack(known).T
    pairs = zip(*linear_sum_assignment(-cosines), strict=True)
    return {int(voice): int(one) for voice, one in pairs if cosines[voice, one] >= least_cosine}


def _numbered(turns: Sequence[Turn], numbers: dict[int, int], n_known: int) -> list[Turn]:
    """The turns with speakers' numbers in place of voices'."""
    found = dict(numbers)
    for _, _, voice in turns:
        found.setdefault(voice, n_known + len(found) - len(numbers))
    return [(start, end, found[voice]) for start, end, voice in turns]


def settle(
    vectors: Vectors, labels: Labels, begins: NDArray[np.bool_], count: Count
) -> tuple[NDArray[np.float32], Vectors]:
    """The second pass. Returns how near each window is to each voice [n, k], and the voices [k].

    A voice with hardly any windows goes to the others, unless there may be no fewer.
    """
    first = voices = _large(vectors, labels, count)
    for i in range(ROUNDS):
        scores = _with_neighbours(vectors @ voices.T, begins)
        nearest = np.unique(scores.argmax(axis=1), return_inverse=True)[1]
        if nearest.max() + 1 < min(voices.shape[0], count.least):  # so many there must be
            return vectors @ first.T, first
        is_last = i == ROUNDS - 1
        voices = _large(vectors, nearest, count) if is_last else _means(vectors, nearest)
    return _with_neighbours(vectors @ voices.T, begins), voices


def _large(vectors: Vectors, labels: Labels, count: Count) -> Vectors:
    """The directions of the voices that have enough windows, the largest first."""
    sizes = np.bincount(labels)
    n_kept = min(max(_n_large(sizes), count.least), count.most or vectors.shape[0])
    return _means(vectors, labels)[np.argsort(-sizes, kind="stable")[:n_kept]]


def _starts(stretches: Sequence[Stretch]) -> Iterator[int]:
    """The first window of each stretch that has one, or of the next that has."""
    return accumulate((len(stretch.middles) for stretch in stretches[:-1]), initial=0)


def _with_neighbours(scores: NDArray[np.float32], begins: NDArray[np.bool_]) -> NDArray[np.float32]:
    before, after = np.roll(scores, 1, axis=0), np.roll(scores, -1, axis=0)
    before[begins] = 0.0
    after[np.roll(begins, -1)] = 0.0
    return scores + np.float32(NEIGHBOUR) * (before + after)

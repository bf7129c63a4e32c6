"""Clusters the vectors of speech windows into voices, and finds who speaks when.

Ward's agglomerative clustering runs on at most `MOST_AT_ONCE` vectors, then on the clusters found.
A node of the tree is split while the cosine of its two sides, corrected for noise within them, is
below a bound, which is lower for few windows. A second pass assigns every window, with its
neighbours, to the nearest voice.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.optimize import linear_sum_assignment

from router.audio.embedding import Vectors, directions
from router.audio.protocol import SpeakerSearch

MOST_AT_ONCE = 800  # 20 ms for a linkage; all vectors of 10 hours would need 9 GB
LEAST_WINDOWS = 2  # of a voice: fewer are noise, or two voices at once
LEAST_WITHIN = 0.05  # mean cosine of a voice's windows
UNSURE = 0.7  # lowers the bound, times the root of the sum of 1 / windows of both sides
ROUNDS = 3  # of the second pass
NEIGHBOUR = 0.5  # weight of a window's neighbours in its own stretch of speech

Sizes = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Speech without a pause, and the middles of its windows, if any; all in samples."""

    start: int
    end: int
    middles: tuple[int, ...]


def find_voices(vectors: Vectors, search: SpeakerSearch) -> Generator[None, None, Vectors]:
    """Returns the voices' directions [k, size]. Yields between steps."""
    sums, sizes = vectors, np.ones(vectors.shape[0])
    pieces = -(-vectors.shape[0] // MOST_AT_ONCE)
    if pieces > 1:
        found, any_number = [], SpeakerSearch(threshold=search.threshold)
        for piece in np.array_split(vectors, pieces):
            found.append(_part(piece, np.ones(piece.shape[0]), any_number))
            yield None
        sums, sizes = (np.concatenate(each) for each in zip(*found, strict=True))
    return directions(_part(sums, sizes, search)[0])


def _part(sums: Vectors, sizes: Sizes, search: SpeakerSearch) -> tuple[Vectors, Sizes]:
    """Join some thousand clusters at most, sums [n, size] of `sizes` vectors, to k voices."""
    n = sums.shape[0]
    if n < 2:
        return sums, sizes
    tree = linkage(directions(sums), "ward")
    sums = np.concatenate((sums, np.zeros((n - 1, sums.shape[1]))))
    sizes = np.concatenate((sizes, np.zeros(n - 1)))
    sides = [(int(left), int(right)) for left, right in tree[:, :2]]
    for node, (left, right) in enumerate(sides, n):
        sums[node], sizes[node] = sums[left] + sums[right], sizes[left] + sizes[right]
    n_pairs = np.maximum(1, sizes * (sizes - 1))
    within = np.maximum(LEAST_WITHIN, ((sums**2).sum(axis=1) - sizes) / n_pairs)  # mean cosines

    def parts(node: int, fewest: int) -> tuple[float, int]:
        """Margin by which a node is two voices, and the node without its too small sides."""
        while node >= n:
            small, large = sorted(sides[node - n], key=lambda side: sizes[side])
            if sizes[small] >= fewest:
                between = sums[small] @ sums[large] / (sizes[small] * sizes[large])
                cosine = between / np.sqrt(within[small] * within[large])
                unsure = UNSURE * np.sqrt(1 / sizes[small] + 1 / sizes[large])
                return float(1 - search.threshold - unsure - cosine), node
            if sizes[large] < fewest:
                break
            node = large
        return -np.inf, node

    for fewest in (LEAST_WINDOWS, 1):
        found = [parts(2 * n - 2, fewest)]
        while len(found) < (search.most or n):
            clearest = max(found)
            if clearest[0] == -np.inf or (clearest[0] <= 0 and len(found) >= search.least):
                break
            found.remove(clearest)
            found += [parts(side, fewest) for side in sides[clearest[1] - n]]
        if len(found) >= search.least:
            break
    nodes = [node for _, node in found]
    return sums[nodes], sizes[nodes]


Turn = tuple[int, int, int]  # first sample, end, speaker number


def find_turns(
    vectors: Vectors,
    stretches: Sequence[Stretch],
    search: SpeakerSearch,
    known: Sequence[Vectors] = (),
) -> Generator[None, None, list[Turn]]:
    """Returns who speaks when, in time order. Yields between steps.

    vectors: [n, size], one for each window of the stretches. known: voices, [size] each, which are
    the speakers 0, 1, ...; others follow in order of appearance.
    """
    if not vectors.shape[0]:
        return [(stretch.start, stretch.end, len(known)) for stretch in stretches]
    n_windows = [len(stretch.middles) for stretch in stretches]
    owners = np.repeat(np.arange(len(stretches)), n_windows)
    begins = np.diff(owners, prepend=-1) > 0  # of stretches: no neighbour before
    smoothed = _with_neighbours(vectors, begins)
    first = yield from find_voices(directions(smoothed), search)
    scores, voices = settle(vectors, first, begins, search)
    yield None
    turns: list[Turn] = []
    for stretch, own in zip(stretches, np.split(scores, np.cumsum(n_windows)[:-1]), strict=True):
        turns += _parts(stretch, own, turns[-1][2] if turns else 0)
    numbers = _recognised(voices, known, search.least_cosine)
    fresh = itertools.count(len(known))
    for _, _, voice in turns:
        if voice not in numbers:
            numbers[voice] = next(fresh)
    return [(start, end, numbers[voice]) for start, end, voice in turns]


def _parts(stretch: Stretch, scores: NDArray[np.float32], before: int) -> Iterator[Turn]:
    """Split a stretch where two voices are equally near. Without windows it is `before`'s."""
    start = stretch.start
    nearest = scores.argmax(axis=1).tolist() if stretch.middles else [before]
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
    if not known:
        return {}
    cosines = voices @ np.stack(known).T
    pairs = zip(*linear_sum_assignment(-cosines), strict=True)
    return {int(voice): int(one) for voice, one in pairs if cosines[voice, one] >= least_cosine}


def settle(
    vectors: Vectors, first: Vectors, begins: NDArray[np.bool_], search: SpeakerSearch
) -> tuple[NDArray[np.float32], Vectors]:
    """The second pass. Returns the windows' scores for the voices [n, k], and the voices."""
    voices = first
    for _ in range(ROUNDS):
        nearest = _with_neighbours(vectors @ voices.T, begins).argmax(axis=1)
        sizes = np.bincount(nearest)
        kept = np.flatnonzero(sizes >= min(LEAST_WINDOWS, sizes.max()))
        if kept.shape[0] < min(first.shape[0], search.least):  # fewer voices than asked for
            return vectors @ first.T, first
        sums = np.zeros((sizes.shape[0], vectors.shape[1]), np.float32)
        np.add.at(sums, nearest, vectors)
        voices = directions(sums[kept])
    return _with_neighbours(vectors @ voices.T, begins), voices


def _with_neighbours(scores: NDArray[np.float32], begins: NDArray[np.bool_]) -> NDArray[np.float32]:
    before, after = np.roll(scores, 1, axis=0), np.roll(scores, -1, axis=0)
    before[begins] = 0.0
    after[np.roll(begins, -1)] = 0.0
    return scores + np.float32(NEIGHBOUR) * (before + after)

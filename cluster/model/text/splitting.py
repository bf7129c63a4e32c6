"""A window's tokens cut into segments at its timestamps: openai/whisper's rule (`transcribe.py`).

Used by the router, which makes segments of the pieces, and by the decoder, which aligns their
words. Pure integers: times are counted in timestamp steps (20 ms) from the window's start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """One segment: its tokens, timestamps included, and its bounds in steps.

    end: None where no timestamp closes it: it lasts as long as the window's audio.
    """

    start: int
    end: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """All segments of a window.

    next_start: the step up to which the window was decoded, when a later window should begin
        there; None when the window was decoded to its end.
    tail: the tokens behind the last closed segment, which belong to none.
    ends_single: the text ends with one timestamp: nothing is said after it.
    is_cut: there were consecutive timestamps to cut at.
    """

    pieces: tuple[Piece, ...]
    next_start: int | None
    tail: tuple[int, ...]
    ends_single: bool
    is_cut: bool


def split_tokens(tokens: Sequence[int], timestamp_begin: int) -> Split:
    """Cut sampled tokens (without end-of-text) at consecutive timestamps.

    `<0> a <60><70> b <100>` gives (0, 60, a), (70, 100, b), decoded to the end;
    `<0> a <60><70> b` gives (0, 60, a) with the tail `<70> b`, to be decoded again from 60 on;
    `<0> a <60>` and `<0> a` are one piece each, to the last timestamp that is not 0, or open.
    """
    own = tuple(tokens)
    is_stamp = [token >= timestamp_begin for token in own]
    ends_single = is_stamp[-2:] == [False, True]
    cuts = [i for i in range(1, len(own)) if is_stamp[i - 1] and is_stamp[i]]
    if not cuts:
        stamps = [token - timestamp_begin for token in own if token >= timestamp_begin]
        end = stamps[-1] if stamps and stamps[-1] > 0 else None
        return Split((Piece(0, end, own),), None, (), ends_single, is_cut=False)
    if ends_single:
        cuts.append(len(own))
    pieces = []
    first = 0
    for cut in cuts:
        bounds = own[first] - timestamp_begin, own[cut - 1] - timestamp_begin
        pieces.append(Piece(*bounds, own[first:cut]))
        first = cut
    next_start = None if ends_single else own[first - 1] - timestamp_begin
    return Split(tuple(pieces), next_start, own[first:], ends_single, is_cut=True)

"""The comparison finds the cheapest way, and refuses what would take too long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.common.errors import InvalidRequestError
from router.word_diff import compared

WORDS = st.lists(st.sampled_from("abcd"), max_size=12)


def least_cost(left: Sequence[str], right: Sequence[str]) -> int:
    row = [2 * j for j in range(len(right) + 1)]
    for i, word in enumerate(left, start=1):
        before, row = row, [2 * i]
        for j, other in enumerate(right, start=1):
            pair = before[j - 1] + (0 if word == other else 3)
            row.append(min(pair, before[j] + 2, row[-1] + 2))
    return row[-1]


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS)
def test_the_way_is_the_cheapest_and_leaves_nothing_out(left: list[str], right: list[str]) -> None:
    steps = compared(left, right)
    assert [one.left for one in steps if one.left is not None] == list(range(len(left)))
    assert [one.right for one in steps if one.right is not None] == list(range(len(right)))
    cost = 0
    for i, j, is_equal in steps:
        assert is_equal == (i is not None and j is not None and left[i] == right[j])
        cost += 0 if is_equal else 2 if i is None or j is None else 3
    assert cost == least_cost(left, right)


def test_what_would_take_too_long_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="20000 words and the audio 5") as refused:
        compared(["word"] * 20_000, ["other"] * 5)
    assert refused.value.code == "text_too_different"

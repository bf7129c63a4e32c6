"""Compares texts of 16-bit arithmetic with those of float32, where near ties go either way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from cluster.common.messages import DecodeResult


def common_prefix(a: DecodeResult, b: DecodeResult) -> int:
    """Tokens from the first one on that are the same."""
    pairs = zip(a.tokens, b.tokens, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def assert_follow(
    found: Sequence[DecodeResult],
    expected: Sequence[DecodeResult],
    tolerance: float,
    share: float,
) -> None:
    """Each text follows the expected one until a near tie.

    Args:
        tolerance: of the log probability of each token before it, in nats.
        share: of all expected tokens, at least so many come before one.
    """
    n_same = 0
    for one, other in zip(found, expected, strict=True):
        assert one.language == other.language
        n = common_prefix(one, other)
        pairs = zip(one.token_logprobs[:n], other.token_logprobs[:n], strict=True)
        largest = max((abs(a - b) for a, b in pairs), default=0.0)
        assert largest <= tolerance, f"log probabilities differ by {largest}"
        n_same += n
    n_all = sum(len(other.tokens) for other in expected)
    assert n_same >= share * n_all, f"{n_same} of {n_all} tokens before the first that differs"

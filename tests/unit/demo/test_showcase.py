"""The demo compares what was heard with what was spoken."""

from __future__ import annotations

from cluster.demo.showcase import verdict


def test_the_same_words_are_as_spoken() -> None:
    assert "all 3 words as spoken" in verdict("Near a bridge.", "near a bridge")


def test_other_words_are_named() -> None:
    told = verdict("Into their forest he went.", "In their forest went now.")
    assert "of 5 words" in told
    assert "in for into" in told
    assert "nothing for he" in told
    assert "now for nothing" in told

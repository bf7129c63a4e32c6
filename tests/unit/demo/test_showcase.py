"""What the demo prints: an honest verdict, and times as the server told them."""

from __future__ import annotations

from cluster.demo.showcase import parse_server_timing, verdict


def test_the_same_words_are_as_spoken() -> None:
    assert "all 3 words as spoken" in verdict("Near a bridge.", "near a bridge")


def test_other_words_are_named() -> None:
    told = verdict("Into their forest he went.", "In their forest went now.")
    assert "of 5 words" in told
    assert "in for into" in told
    assert "nothing for he" in told
    assert "now for nothing" in told


def test_server_timing_is_read_in_milliseconds() -> None:
    header = 'audio;dur=7.6, encode;dur=19.1;desc="1 windows", total;dur=351'
    assert parse_server_timing(header) == {"audio": 7.6, "encode": 19.1, "total": 351.0}
    assert parse_server_timing("") == {}

"""What a person sees of a run."""

from __future__ import annotations

from rich.console import Console

from cluster.archives.inputs import Item
from cluster.archives.run import RunProgress, hours
from tests.support.router_fakes import make_transcript

QUIET = Console(quiet=True)
TWO_HOURS = make_transcript(" talk", duration_s=7200.0)


def hour(name: str) -> Item:
    return Item(name, 16_000 * 3600, 0, name)


def test_progress_tells_hours_speed_and_time_to_go() -> None:
    now = [0.0]
    progress = RunProgress(QUIET, lambda: now[0])
    progress.n_pending, progress.about_s, progress.is_listed = 4, 4 * 3600.0, True
    now[0] = 600.0
    progress.end(hour("0.mp3"), TWO_HOURS)
    progress.end(hour("1.mp3"), ValueError("no audio"))
    # Files had twice the audio that their size told: so will the others.
    assert progress.line() == (
        "2 of 4 files, 2.0 h of about 6.0 h of audio, 12.0 hours per hour, 20.0 min to go, 1 failed"
    )
    progress.is_listed = False
    assert progress.line().startswith("2 of 4 or more files, ")
    progress.n_pending, progress.is_listed = 1, True
    assert progress.line().startswith("2 of 1 file, ")


def test_what_is_done_of_a_long_file_counts() -> None:
    now = [0.0]
    progress = RunProgress(QUIET, lambda: now[0])
    progress.n_pending, progress.about_s, progress.is_listed = 2, 2 * 3600.0, True
    now[0] = 900.0
    progress.note(hour("0.mp3"), 1800.0)
    assert progress.line() == (
        "0 of 2 files, 30.0 min of about 2.0 h of audio, 2.0 hours per hour, 45.0 min to go"
    )
    progress.end(hour("0.mp3"), TWO_HOURS)
    assert progress.done_s == 7200.0
    assert "2.0 h of about 4.0 h" in progress.line()
    progress.note(hour("1.mp3"), 60.0)
    progress.note(hour("1.mp3"), 0.0)
    assert "2.0 h of about 4.0 h" in progress.line(), "it began again"


def test_times_are_told_by_their_largest_unit() -> None:
    assert [hours(s) for s in (5, 90, 7200)] == ["5 s", "1.5 min", "2.0 h"]

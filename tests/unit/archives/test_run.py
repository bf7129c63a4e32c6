"""A run over an archive: what it writes, what the next one still does, and what failures cost."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from cluster.archives.archive import Archive
from cluster.archives.inputs import Item, list_items
from cluster.archives.ledger import Ledger
from cluster.archives.places import Place
from cluster.archives.progress import RunProgress, duration, hours
from cluster.archives.run import Plan, make_plan, run_archive, write_failures
from cluster.errors import ConfigurationError, InvalidRequestError, OverloadedError
from router.api.formats import render
from tests.support.archives import HEARD_BYTES, FakeEngine, LocalRun, make_transcript

QUIET = Console(quiet=True)


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for i in range(5):
        # So large that each is a block of its own.
        (folder / f"{i}.mp3").write_bytes(f"talk {i} ".encode() * 150_000)
    (folder / "bad.mp3").write_bytes(b"broken ".ljust(2_000_000))
    return folder


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place.of(str(tmp_path / "texts"))
    return Place.of(f"memory://texts/{tmp_path.name}")


def run(
    archive: Archive, names: list[str], engine: FakeEngine, stop_after: int | None = None
) -> Plan:
    items = list_items(names)
    with Ledger.opened(archive.where) as ledger:
        plan = make_plan(archive, items, ledger)
        with RunProgress(plan.pending, QUIET) as progress:
            work = LocalRun(engine, stop_after)
            try:
                run_archive(archive, plan, items, ledger, progress, work)
            except KeyboardInterrupt:
                assert stop_after is not None
        write_failures(archive, items, ledger)
    return plan


def dataset(where: Place) -> dict[str, dict[str, Any]]:
    """Rows by name of the file; each file has one."""
    rows: list[dict[str, Any]] = []
    for info in (where / "transcripts").below():
        with where.files.open_input_file(info.path) as content:
            rows += pq.read_table(content).to_pylist()
    assert len({row["path"] for row in rows}) == len(rows)
    return {Path(row["path"]).name: row for row in rows}


def test_texts_and_failures_are_written(sounds: Path, where: Place) -> None:
    engine = FakeEngine()
    archive = Archive(where, formats=("json", "srt", "vtt", "txt"))
    run(archive, [str(sounds)], engine)
    rows = dataset(where)
    assert len(rows) == 6
    assert rows["1.mp3"]["text"].startswith("talk 1 talk 1")
    assert rows["1.mp3"]["duration"] == 2.5
    assert rows["bad.mp3"]["error"] == "this is no audio"
    content = (sounds / "1.mp3").read_text()[:HEARD_BYTES]
    expected = render(make_transcript(content), "srt").body
    assert (where / "1.srt").read() == expected
    assert json.loads((where / "1.json").read())["segments"][0]["tokens"] == [50364, 7]
    failures = list(csv.reader((where / "failures.csv").read().decode().splitlines()))
    assert failures == [["path", "reason"], [str(sounds / "bad.mp3"), "this is no audio"]]
    names = {one.path.rpartition("/")[2] for one in where.below()}
    assert not {name for name in names if name.startswith("bad.")}


def test_an_interrupted_run_goes_on_where_it_was(sounds: Path, where: Place) -> None:
    archive, first, second = Archive(where), FakeEngine(), FakeEngine()
    run(archive, [str(sounds)], first, stop_after=2)
    assert len(dataset(where)) == 2
    plan = run(archive, [str(sounds)], second)
    assert plan.n_done + len(plan.failed) == 2
    assert sorted(first.heard + second.heard) == sorted(
        file.read_text()[:HEARD_BYTES] for file in sounds.iterdir()
    )
    assert not run(archive, [str(sounds)], FakeEngine()).pending


def test_only_what_changed_is_done_again(sounds: Path, where: Place) -> None:
    archive = Archive(where)
    run(archive, [str(sounds)], FakeEngine())
    (sounds / "2.mp3").write_bytes(b"another talk")
    os.utime(sounds / "3.mp3", ns=(1, 1))
    by_stat = FakeEngine()
    run(archive, [str(sounds)], by_stat)
    assert sorted(text[:6] for text in by_stat.heard) == ["anothe", "talk 3"]
    assert dataset(where)["2.mp3"]["text"] == "another talk"


def test_content_that_is_done_is_not_done_again_wherever_it_is(sounds: Path, where: Place) -> None:
    """Touched, moved, copied, or within a Parquet file; what is told of it is of the new place."""
    archive = Archive(where)
    run(archive, [str(sounds)], FakeEngine())
    (sounds / "2.mp3").write_bytes(b"another talk")
    os.utime(sounds / "3.mp3", ns=(1, 1))
    (sounds / "4.mp3").rename(sounds / "moved.mp3")
    (sounds / "copied.mp3").write_bytes((sounds / "0.mp3").read_bytes())
    shutil.copy(sounds / "bad.mp3", sounds / "as bad.mp3")
    held = pa.table({"bytes": [(sounds / "1.mp3").read_bytes(), b"a third talk"]})
    pq.write_table(held, sounds / "held.parquet")
    names, by_content = [str(sounds), str(sounds / "held.parquet")], FakeEngine()
    plan = run(replace(archive, match="content"), names, by_content)
    assert sorted(by_content.heard) == ["a third talk", "another talk"]
    assert (plan.n_done, len(plan.failed)) == (6, 2)
    rows = dataset(where)
    assert rows["copied.mp3"]["text"] == rows["0.mp3"]["text"]
    assert rows["held.parquet#0"]["text"] == rows["1.mp3"]["text"]
    assert (where / "moved.json").read() == (where / "4.json").read()
    assert rows["3.mp3"]["mtime_ns"] == 1
    by_stat = FakeEngine()
    run(archive, names, by_stat)
    assert by_stat.heard == [], "the next run need not read them"


def test_objects_of_a_bucket_are_known_by_content_too(where: Place) -> None:
    import fsspec

    def put(name: str, content: bytes) -> None:
        with fsspec.open(f"memory://talks{where.path}/{name}", "wb") as file:
            file.write(content)

    put("a.mp3", b"talk a")
    names = [f"memory://talks{where.path}"]
    run(Archive(where), names, FakeEngine())
    put("b.mp3", b"talk a")
    put("c.mp3", b"talk c")
    engine = FakeEngine()
    run(Archive(where, match="content"), names, engine)
    assert engine.heard == ["talk c"]
    assert dataset(where)["b.mp3"]["text"] == "talk a"


def test_other_settings_are_other_texts(sounds: Path, where: Place) -> None:
    archive = Archive(where)
    run(archive, [str(sounds)], FakeEngine())
    for other in (
        replace(archive, fields={"language": "de"}),
        replace(archive, model="openai/whisper-large-v3"),
        replace(archive, task="translate"),
    ):
        assert other.settings != archive.settings
    engine = FakeEngine()
    run(replace(archive, fields={"language": "de"}), [str(sounds)], engine)
    assert len(engine.heard) == 6
    assert len(dataset(where)) == 6


def test_another_format_is_written_from_what_is_there(sounds: Path, where: Place) -> None:
    run(Archive(where, formats=()), [str(sounds)], FakeEngine())
    engine = FakeEngine()
    run(Archive(where, formats=("vtt",)), [str(sounds)], engine)
    assert engine.heard == []
    assert (where / "4.vtt").read().startswith(b"WEBVTT")


def test_failures_are_left_alone_unless_they_may_pass(sounds: Path, where: Place) -> None:
    archive = Archive(where)
    run(archive, [str(sounds)], FakeEngine())
    again, asked = FakeEngine(), FakeEngine()
    assert run(archive, [str(sounds)], again).failed == [str(sounds / "bad.mp3")]
    assert again.heard == []
    (sounds / "bad.mp3").write_bytes((sounds / "bad.mp3").read_bytes())  # as broken, but new
    run(replace(archive, retry_failed=True), [str(sounds)], asked)
    assert len(asked.heard) == 1


def test_what_failed_for_the_clusters_reasons_is_tried_by_the_next_run(
    sounds: Path, where: Place
) -> None:
    class FullEngine(FakeEngine):
        async def transcribe(self, *args: Any, **options: Any) -> Any:
            raise OverloadedError("no worker could finish a window")

    archive, engine = Archive(where), FakeEngine()
    run(archive, [str(sounds / "1.mp3")], FullEngine())
    assert dataset(where)["1.mp3"]["retryable"]
    run(archive, [str(sounds / "1.mp3")], engine)
    assert len(engine.heard) == 1
    assert dataset(where)["1.mp3"]["error"] is None


def test_what_is_not_there_is_a_failure_of_its_own(tmp_path: Path, where: Place) -> None:
    run(Archive(where), [str(tmp_path / "gone.mp3")], FakeEngine())
    assert "there is no such file" in dataset(where)["gone.mp3"]["error"]


def test_longest_first_and_equal_names_apart(tmp_path: Path) -> None:
    for name, size in (("a.wav", 10), ("a.mp3", 10_000), ("b/a.wav", 5), ("transcripts.wav", 1)):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"x" * size)
    items = list_items([str(tmp_path / "in")])
    with Ledger.opened(Place.of(str(tmp_path / "out"))) as ledger:
        plan = make_plan(Archive(Place.of(str(tmp_path / "out"))), items, ledger)
    assert plan.pending[0].relative == "a.mp3"
    names = {key.removeprefix(f"{tmp_path}/in/"): name for key, name in plan.outputs.items()}
    assert names == {
        "a.mp3": "a",
        "a.wav": "a.wav",
        "b/a.wav": "b/a",
        "transcripts.wav": "transcripts.wav",
    }


@pytest.mark.parametrize("name", ["a" * 251, "あ" * 83])
def test_names_as_long_as_they_can_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    for text, suffix in (("one", "mp3"), ("two", "wav")):
        (tmp_path / f"in/{name}.{suffix}").write_text(text)
    where = Place.of(str(tmp_path / "out"))
    run(Archive(where, formats=("json", "txt")), [str(tmp_path / "in")], FakeEngine())
    texts = [file.read_text().strip() for file in (tmp_path / "out").glob("*.txt")]
    assert sorted(texts) == ["one", "two"]


# --------------------------------------------------------------------------- the ledger


def make_row(path: str, **changes: Any) -> dict[str, Any]:
    from cluster.archives.rows import ITEM_COLUMNS, failed_row

    row = dict.fromkeys(ITEM_COLUMNS) | failed_row(OverloadedError("full"))
    own = {"path": path, "size": 1, "mtime_ns": 2, "settings": "s", "output": path}
    return row | own | changes


def test_what_a_killed_run_wrote_counts(tmp_path: Path) -> None:
    """Killed, it neither makes a part of its journal nor ends its last line."""
    where = Place.of(str(tmp_path))
    killed = Ledger(where)
    killed.add([make_row("a"), make_row("b")])
    (journal,) = (tmp_path / "_splitscribe/journal").iterdir()
    with journal.open("ab") as file:
        file.write(b'{"path": "c", "si')
    with Ledger.opened(where) as ledger:
        assert ledger.done.keys() == {"a", "b"}
        assert not list((tmp_path / "_splitscribe/journal").iterdir())
    assert dataset(where).keys() == {"a", "b"}


def test_a_part_that_came_to_nothing_is_passed_over(where: Place) -> None:
    """A write into a bucket that is interrupted may leave an object of no bytes."""
    with Ledger.opened(where) as ledger:
        ledger.add([make_row("a")])
    (where / "transcripts/part-x-0000.parquet").write_whole(b"")
    with Ledger.opened(where) as ledger:
        assert ledger.done.keys() == {"a"}
    assert dataset(where).keys() == {"a"}


def test_a_place_that_does_not_answer_is_told_by_its_name(
    where: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is opened, and when the run's last rows are kept."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError("access denied")

    def add_and_lose(method: str, when: str) -> None:
        if when == "before":
            monkeypatch.setattr(Place, method, refuse)
        with Ledger.opened(where) as ledger:
            ledger.add([make_row("a")])
            monkeypatch.setattr(Place, method, refuse)

    with pytest.raises(ConfigurationError, match=r"texts.*access denied"):
        add_and_lose("write_whole", "in the middle")
    with pytest.raises(ConfigurationError, match=r"texts.*access denied"):
        add_and_lose("below", "before")


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    @contextmanager
    def opened() -> Iterator[Ledger]:
        with Ledger.opened(Place.of(str(tmp_path))) as ledger:
            yield ledger

    with opened(), pytest.raises(InvalidRequestError, match="another run"), opened():
        pass
    with opened():
        pass


def test_a_file_has_one_row_however_often_it_was_done(tmp_path: Path) -> None:
    where = Place.of(str(tmp_path))
    for round_ in range(3):
        with Ledger.opened(where) as ledger:
            ledger.add([make_row("a", size=round_), make_row(f"only {round_}")])
    assert dataset(where)["a"]["size"] == 2
    assert len(dataset(where)) == 4


# --------------------------------------------------------------------------- progress


def test_progress_tells_hours_speed_and_time_to_go() -> None:
    now = [0.0]
    items = [Item(f"/{i}.mp3", 16_000 * 3600, 0, f"{i}.mp3") for i in range(4)]
    with RunProgress(items, QUIET, lambda: now[0]) as progress:
        now[0] = 600.0
        progress.add([{"path": "/0.mp3", "error": None, "duration": 7200.0}])
        progress.add([{"path": "/1.mp3", "error": "broken"}])
        # Files had twice the audio that their size told: so will the others.
        assert progress.line() == (
            "2 of 4 files, 2.0 h of about 6.0 h of audio, 12.0 hours per hour, 20 min to go, "
            "1 failed"
        )


def test_what_is_done_of_a_long_file_counts() -> None:
    now = [0.0]
    items = [Item(f"/{i}.mp3", 16_000 * 3600, 0, f"{i}.mp3") for i in range(2)]
    with RunProgress(items, QUIET, lambda: now[0]) as progress:
        now[0] = 900.0
        progress.heard({"/0.mp3": (1800.0, 7200.0), "/of another run.mp3": (5.0, 5.0)})
        # The first file is twice as long as its size told, which says nothing of the other.
        assert progress.line() == (
            "0 of 2 files, 30.0 min of about 3.0 h of audio, 2.0 hours per hour, 1 h 15 min to go"
        )
        progress.add([{"path": "/0.mp3", "error": None, "duration": 7200.0}])
        progress.heard({"/0.mp3": (7200.0, 7200.0)})
        assert progress.done_s == 7200.0
        assert "2.0 h of about 4.0 h" in progress.line()
        progress.heard({"/1.mp3": (60.0, 60.0)})
        progress.heard({})
        assert "2.0 h of about 4.0 h" in progress.line(), "it began again"


def test_times_are_told_by_their_two_largest_units() -> None:
    assert [duration(s) for s in (0.2, 61, 7260, 190_000)] == [
        "0 s", "1 min 1 s", "2 h 1 min", "2 d 4 h",
    ]  # fmt: skip
    assert [hours(s) for s in (5, 90, 7200)] == ["5 s", "1.5 min", "2.0 h"]

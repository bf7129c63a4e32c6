"""A run over an archive: what it writes, what the next one still does, and what failures cost."""

from __future__ import annotations

import asyncio
import csv
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow.fs
import pytest
from rich.console import Console

from cluster.archives.inputs import Item, list_items
from cluster.archives.outputs import Archive, Outputs, write_failures
from cluster.archives.places import Place
from cluster.archives.run import LOOKED_AT, RunProgress, look_at, run_archive
from cluster.common.errors import InvalidRequestError, OverloadedError
from router.api.formats import render
from router.api.params import TranscriptionParams
from tests.support.archives import HEARD_BYTES, FakeEngine, Stopped
from tests.support.router_fakes import make_transcript

QUIET = Console(quiet=True)
SIDECAR = ".splitscribe.json"


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.mp3").write_bytes(f"talk {i} ".encode() * 100)
    (folder / "bad.mp3").write_bytes(b"broken ".ljust(2000))
    return folder


@pytest.fixture(params=["folder", "bucket"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "folder":
        return Place.of(str(tmp_path / "texts"))
    return Place.of(f"memory://texts/{tmp_path.name}")


def run_items(archive: Archive, items: Iterable[Item], engine: Any) -> RunProgress:
    progress = RunProgress(QUIET)
    with Outputs.opened(archive) as outputs:

        async def work() -> None:
            listing = look_at(items, outputs, progress)
            await run_archive(archive, outputs, engine, progress, listing)

        try:
            asyncio.run(work())
        except Stopped:
            assert engine.stop_after is not None
        write_failures(archive.where, progress.failures)
    return progress


def run(archive: Archive, names: list[str], engine: Any) -> RunProgress:
    return run_items(archive, list_items(names), engine)


def sidecars(where: Place) -> dict[str, dict[str, Any]]:
    """By the input's name."""
    kept = [json.loads(one.read()) for one in where.below() if one.path.endswith(SIDECAR)]
    found = {one["source"]["path"]: one for one in kept}
    assert len(found) == len(kept)
    return {path.rpartition("/")[2]: one for path, one in found.items()}


def outputs_of(where: Place) -> set[str]:
    names = {one.path.removeprefix(f"{where.path}/") for one in where.below()}
    return {name for name in names if not name.rpartition("/")[2].startswith(".")}


def test_texts_sidecars_and_failures_are_written(sounds: Path, where: Place) -> None:
    formats = ("json", "srt", "vtt", "txt")
    archive = Archive(where, {"language": "en"}, model="small", formats=formats)
    run(archive, [str(sounds)], FakeEngine())
    content = (sounds / "1.mp3").read_text()[:HEARD_BYTES]
    expected, _ = render(
        make_transcript(f" {content}"), TranscriptionParams("", response_format="srt")
    )
    assert (where / "1.srt").read() == expected
    assert json.loads((where / "1.json").read())["segments"][0]["tokens"][:2] == [50364, 2425]
    found = sidecars(where)
    assert len(found) == 6
    stat = (sounds / "1.mp3").stat()
    source = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "path": str(sounds / "1.mp3")}
    assert found["1.mp3"]["source"] == source
    assert found["1.mp3"]["settings"] == archive.settings
    assert found["1.mp3"]["duration"] == 2.5
    assert set(found["1.mp3"]["written"]) == set(formats)
    for name, hashed in found["1.mp3"]["written"].items():
        written = (where / f"1.{name}").read()
        assert hashlib.blake2b(written, digest_size=16).hexdigest() == hashed
    assert (found["bad.mp3"]["error"], found["bad.mp3"]["written"]) == ("this is no audio", {})
    failures = list(csv.reader((where / "failures.csv").read().decode().splitlines()))
    assert failures == [["path", "reason"], [str(sounds / "bad.mp3"), "this is no audio"]]
    assert not {name for name in outputs_of(where) if name.startswith("bad.")}


def test_an_interrupted_run_goes_on_where_it_was(sounds: Path, where: Place) -> None:
    archive = Archive(where, files_at_once=1)
    first, second = FakeEngine(stop_after=2), FakeEngine()
    run(archive, [str(sounds)], first)
    assert len(sidecars(where)) == 2
    progress = run(archive, [str(sounds)], second)
    assert progress.n_before + progress.n_failed_before == 2
    assert sorted(first.heard + second.heard) == sorted(
        file.read_text()[:HEARD_BYTES] for file in sounds.iterdir()
    )
    assert not run(archive, [str(sounds)], FakeEngine()).n_pending


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, ending: str) -> Iterator[None]:
    """End the run before it writes a file with this ending."""
    real = Place.write_whole

    def write_whole(self: Place, content: bytes) -> None:
        if self.path.endswith(ending):
            raise SystemExit
        real(self, content)

    with monkeypatch.context() as patched:
        patched.setattr(Place, "write_whole", write_whole)
        with pytest.raises(SystemExit):
            yield


@pytest.mark.parametrize("at", ["/1.srt", "/.1.splitscribe.json"])
def test_killed_between_two_formats_a_file_is_done_again(
    sounds: Path, where: Place, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    archive, names = Archive(where, formats=("json", "srt")), [str(sounds / "1.mp3")]
    with killed_at(monkeypatch, at):
        run(archive, names, FakeEngine())
    assert "1.json" in outputs_of(where)
    assert not sidecars(where)
    engine = FakeEngine()
    run(archive, names, engine)
    assert len(engine.heard) == 1
    assert sidecars(where)["1.mp3"]["written"].keys() == {"json", "srt"}
    assert {"1.json", "1.srt"} <= outputs_of(where)


def test_killed_over_older_outputs_nothing_passes_for_done(
    sounds: Path, where: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    german = Archive(where, {"language": "de"}, formats=("json", "srt"))
    english = replace(german, fields={"language": "en"})
    names = [str(sounds / "1.mp3")]
    run(german, names, FakeEngine())
    with killed_at(monkeypatch, "/1.srt"):
        run(english, names, FakeEngine())
    for archive in (german, english):
        assert run(archive, names, FakeEngine()).n_pending == 1


def test_only_what_changed_is_done_again(sounds: Path, where: Place) -> None:
    archive = Archive(where)
    run(archive, [str(sounds)], FakeEngine())
    (sounds / "2.mp3").write_bytes(b"another talk")
    os.utime(sounds / "3.mp3", ns=(1, 1))
    engine = FakeEngine()
    run(archive, [str(sounds)], engine)
    assert sorted(text[:6] for text in engine.heard) == ["anothe", "talk 3"]
    assert json.loads((where / "2.json").read())["text"] == "another talk"


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
        run(other, [str(sounds)], engine)
        assert len(engine.heard) == 6
        assert {one["settings"]["model"] for one in sidecars(where).values()} == {other.model}
        assert not run(other, [str(sounds)], FakeEngine()).n_pending


def test_another_format_is_another_transcription(sounds: Path, where: Place) -> None:
    names, engine = [str(sounds / "3.mp3")], FakeEngine()
    run(Archive(where), names, engine)
    for _ in range(2):
        run(Archive(where, formats=("json", "vtt")), names, engine)
    assert len(engine.heard) == 2
    assert sidecars(where)["3.mp3"]["written"].keys() == {"json", "vtt"}
    run(Archive(where), names, engine)
    assert len(engine.heard) == 2, "what is asked for is there"
    (where / "3.vtt").remove()
    run(Archive(where, formats=("vtt",)), names, engine)
    assert len(engine.heard) == 3
    assert (where / "3.vtt").read().startswith(b"WEBVTT")


def test_sidecars_tell_recordings_of_voices_apart_and_hold_none(where: Place) -> None:
    kept = []
    for content in ("UklGRg", "UklGRh"):
        voices = (f"data:audio/wav;base64,{content}",)
        settings = Archive(where, fields={"known_speaker_references": voices}).settings
        assert content not in json.dumps(settings)
        kept.append(settings)
    assert kept[0] != kept[1]


def test_failures_are_left_alone_unless_they_may_pass(sounds: Path, where: Place) -> None:

    class FullEngine(FakeEngine):
        async def transcribe(self, *args: Any, **options: Any) -> Any:
            if "1.mp3" in str(args[0]):
                raise OverloadedError("no worker could finish a window")
            return await super().transcribe(*args, **options)

    archive, again, asked = Archive(where), FakeEngine(), FakeEngine()
    run(archive, [str(sounds)], FullEngine())
    assert "no worker" in sidecars(where)["1.mp3"]["error"]
    progress = run(archive, [str(sounds)], again)
    assert [text[:6] for text in again.heard] == ["talk 1"]
    assert (progress.failures.keys(), progress.n_failed_before) == ({str(sounds / "bad.mp3")}, 1)
    assert sidecars(where)["1.mp3"]["error"] is None
    run(replace(archive, retry_failed=True), [str(sounds)], asked)
    assert [text[:6] for text in asked.heard] == ["broken"]


def test_what_a_list_names_wrongly_is_a_failure_of_its_own(tmp_path: Path, where: Place) -> None:
    (tmp_path / "list.jsonl").write_text("gone.mp3\nnosuch://bucket/x.mp3\n")
    progress = run(Archive(where), [str(tmp_path / "list.jsonl")], FakeEngine())
    assert "there is no such file" in progress.failures[f"{tmp_path}/gone.mp3"]
    assert "cannot be opened" in progress.failures["nosuch://bucket/x.mp3"]


def test_equal_names_stay_apart(tmp_path: Path, where: Place) -> None:
    for name in ("a/talk.wav", "a/talk.mp3", "b/talk.mp3", "b/in/talk.mp3"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    names, archive = [str(tmp_path / "a"), str(tmp_path / "b")], Archive(where, formats=("txt",))
    run(archive, names, FakeEngine())
    texts = {name: (where / name).read().decode().strip() for name in outputs_of(where)}
    del texts["failures.csv"]
    assert texts == {
        "talk.txt": "a/talk.mp3",
        "talk.wav.txt": "a/talk.wav",
        "talk.mp3.txt": "b/talk.mp3",
        "in/talk.txt": "b/in/talk.mp3",
    }
    (tmp_path / "a/talk.mp3").unlink()
    (tmp_path / "c").mkdir()
    (tmp_path / "c/talk.mp3").write_text("c/talk.mp3")
    engine = FakeEngine()
    run(archive, [str(tmp_path / "c"), *reversed(names)], engine)
    assert engine.heard == ["c/talk.mp3"]
    assert (where / "talk.txt").read() == b"a/talk.mp3\n"
    assert (where / "talk.mp3-2.txt").read() == b"c/talk.mp3\n"


def test_a_sidecar_is_read_once_however_many_share_its_name(
    tmp_path: Path, where: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for suffix in ("wav", "mp3", "ogg"):
        (tmp_path / f"talk.{suffix}").write_text(suffix)
    run(Archive(where), [str(tmp_path / "talk.ogg")], FakeEngine())
    asked: list[str] = []
    read = Place.read

    def count(place: Place) -> bytes:
        asked.append(place.path)
        return read(place)

    monkeypatch.setattr(Place, "read", count)
    items = [next(iter(list_items([str(tmp_path / f"talk.{one}")]))) for one in ("wav", "mp3")]
    Outputs(Archive(where)).look(items)
    assert asked.count((where / ".talk.splitscribe.json").path) == 1


def test_the_longest_of_what_is_listed_goes_first(tmp_path: Path) -> None:
    for i, size in enumerate((10, 20, 5000, 100)):
        (tmp_path / f"{i}.mp3").write_bytes(f"talk {i} ".encode().ljust(size))
    engine = FakeEngine()
    archive = Archive(Place.of(f"{tmp_path}/out"), files_at_once=1)
    run(archive, [str(tmp_path)], engine)
    assert [text[:6] for text in engine.heard] == ["talk 2", "talk 3", "talk 1", "talk 0"]


@pytest.mark.parametrize("name", ["a" * 251, "あ" * 83])
def test_names_as_long_as_they_can_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "in").mkdir()
    for text, suffix in (("one", "mp3"), ("two", "wav")):
        (tmp_path / f"in/{name}.{suffix}").write_text(text)
    where = Place.of(str(tmp_path / "out"))
    run(Archive(where, formats=("json", "txt")), [str(tmp_path / "in")], FakeEngine())
    texts = [file.read_text().strip() for file in (tmp_path / "out").glob("*.txt")]
    assert sorted(texts) == ["one", "two"]
    assert len(sidecars(where)) == 2


def test_work_begins_while_a_large_folder_is_listed(tmp_path: Path) -> None:
    (tmp_path / "talk.mp3").write_text("talk")
    stat, n_listed, n_before = (tmp_path / "talk.mp3").stat(), 0, 0

    class Begun(FakeEngine):
        async def transcribe(self, *args: Any, **options: Any) -> Any:
            nonlocal n_before
            n_before = n_before or n_listed
            return await super().transcribe(*args, **options)

    def listing() -> Iterable[Item]:
        nonlocal n_listed
        for i in range(100_000):
            n_listed += 1
            path = str(tmp_path / "talk.mp3")
            yield Item(path, stat.st_size, stat.st_mtime_ns, f"{i}.mp3")

    where = Place.of(str(tmp_path / "out"))
    run_items(Archive(where, files_at_once=1), listing(), Begun(stop_after=1))
    assert 0 < n_before <= 2 * LOOKED_AT


def test_buckets_are_listed_once_and_asked_of_no_file(
    where: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    for i in range(30):
        with fsspec.open(f"memory://talks{where.path}/{i}.mp3", "wb") as file:
            file.write(f"talk {i}".encode())
    asked: list[Any] = []
    handler = pyarrow.fs.FSSpecHandler

    def counted(name: str) -> None:
        real = getattr(handler, name)

        def count(self: Any, what: Any) -> Any:
            asked.append(what)
            return real(self, what)

        monkeypatch.setattr(handler, name, count)

    counted("get_file_info")
    counted("get_file_info_selector")
    names = [f"memory://talks{where.path}"]
    for n_pending in (30, 0):
        asked.clear()
        assert run(Archive(where, formats=("json", "txt")), names, FakeEngine()).n_pending == (
            n_pending
        )
        n_listings = sum(not isinstance(what, list) for what in asked)
        assert n_listings == 1 + (not where.is_local)
        assert [what for what in asked if isinstance(what, list)] == [[f"/talks{where.path}"]]


def test_an_output_that_cannot_be_written_ends_the_run(
    sounds: Path, where: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "write_whole", Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="full"):
        run(Archive(where), [str(sounds)], FakeEngine())


def test_two_runs_do_not_write_to_one_place(tmp_path: Path) -> None:
    archive = Archive(Place.of(str(tmp_path)))
    with (
        Outputs.opened(archive),
        pytest.raises(InvalidRequestError, match="another run"),
        Outputs.opened(archive),
    ):
        pass
    with Outputs.opened(archive):
        pass

"""Names become items: folders, globs, manifests of three kinds, and what is not there."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.archives import places
from cluster.archives.inputs import Item, list_items
from cluster.archives.places import Place
from cluster.common.errors import InvalidRequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.mp3", "deep/er/b.WAV", "deep/notes.txt", "c.flac"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 7)
    return tmp_path


def listed(names: list[str], stdin: list[str] | None = None) -> list[Item]:
    return list(list_items(names, stdin or ()))


def parquet(**columns: list[Any]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def heard(item: Item) -> bytes:
    with Place.of(item.path).as_local_file() as audio:
        return audio.read_bytes()


def named(items: list[Item]) -> list[str]:
    return [item.relative for item in items]


def test_a_folder_is_its_audio_files_at_any_depth(folder: Path) -> None:
    items = listed([str(folder)])
    assert named(items) == ["a.mp3", "c.flac", "deep/er/b.WAV"]
    assert {item.size for item in items} == {7}
    assert items[0].path == str(folder / "a.mp3")
    assert items[0].mtime_ns == (folder / "a.mp3").stat().st_mtime_ns


def test_a_file_named_twice_is_one_item(folder: Path) -> None:
    assert len(listed([str(folder / "a.mp3"), str(folder), str(folder / "a*")])) == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("{folder}/*.ogg", "no file matches"),
        ("{folder}/empty", "no audio file"),
        ("{folder}/gone.mp3", "no file or folder"),
        ("nosuch://bucket/x.mp3", "cannot be opened"),
        ("~nobody-here/a.mp3", "no file or folder"),
    ],
)
def test_what_is_named_and_not_there_is_refused(folder: Path, name: str, why: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(InvalidRequestError, match=why):
        list_items([str(folder), name.format(folder=folder)])


@pytest.mark.parametrize("root", ["memory://globs", "{folder}"])
def test_globs_mean_the_same_everywhere(folder: Path, root: str) -> None:
    """A star stops at a folder's end, two of them go on; a name with signs of globs is a name."""
    import fsspec

    root = root.format(folder=folder / "talks")
    for name in ("a.mp3", "in/b.mp3", "in/deep/c.mp3", "in/d[1].mp3"):
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(b"x")

    def found(name: str) -> list[str]:
        paths = [item.path for item in listed([f"{root}/{name}"])]
        return sorted(path.rpartition("talks" if "talks" in path else "globs")[2] for path in paths)

    assert found("*.mp3") == ["/a.mp3"]
    assert found("*/b.mp3") == ["/in/b.mp3"]
    assert found("**/*.mp3") == ["/a.mp3", "/in/b.mp3", "/in/d[1].mp3", "/in/deep/c.mp3"]
    assert found("in/d[1].mp3") == ["/in/d[1].mp3"]
    assert found("in/[a-c].mp3") == ["/in/b.mp3"]


def test_a_file_url_is_a_path(folder: Path) -> None:
    (folder / "with space.mp3").write_bytes(b"x")
    for url in (f"file://{folder}/with space.mp3", f"file://{folder}/with%20space.mp3"):
        assert [item.path for item in listed([url])] == [str(folder / "with space.mp3")]
    assert Place.of(f"file://{folder}").is_local


def test_a_copy_of_an_object_has_no_name_that_a_killed_run_would_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with fsspec.open("memory://copied/a.mp3", "wb") as file:
        file.write(b"abc")
    with Place.of("memory://copied/a.mp3").as_local_file() as audio:
        assert not list(tmp_path.iterdir())
        assert subprocess.check_output(["cat", audio]) == b"abc"


def test_names_in_a_bucket_may_have_any_signs() -> None:
    place = Place.of("gs://anonymous@talks/2026")
    below = place / "a b?.mp3"
    assert (place.path, below.name) == ("talks/2026", "gs://anonymous@talks/2026/a b?.mp3")
    again = Place.of(below.name)
    assert (again.path, again.files) == ("talks/2026/a b?.mp3", place.files)
    assert again.folder.name == place.name


@pytest.mark.slow
def test_a_bucket_of_google_without_credentials_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself pyarrow asks for a quarter of an hour."""
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "CLOUD_STORAGE_EMULATOR_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(folder))  # where Google's tools leave some
    monkeypatch.setattr(places, "GOOGLE_WAIT_S", 2)
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        listed(["gs://splitscribe-has-no-such-bucket/talks"])


def test_manifests_that_match_a_glob_are_read(folder: Path) -> None:
    for number, name in enumerate(("c.flac", "a.mp3")):
        (folder / f"part-{number}.parquet").write_bytes(parquet(path=[name]))
    assert named(listed([f"{folder}/part-*.parquet"])) == ["c.flac", "a.mp3"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("bad.parquet", b"nothing", "bad.parquet cannot be read"),
        ("audio.parquet", parquet(audio=[{"bytes": b"1", "path": "a.mp3"}]), "Ray Data"),
        ("bad.csv", b"path\n\xff\xfe\n", "bad.csv cannot be read"),
        ("wide.csv", b"id\n1\n", "no column of paths"),
        ("bad.jsonl", b'{"path": \n', "is not JSON"),
        ("deep.jsonl", b'{"path":' + b"[" * 100_000, "is not JSON"),
        ("long.jsonl", b'{"path":' + b"1" * 5000 + b"}", "is not JSON"),
        ("number.jsonl", b'{"path": 7}\n', "has int in place of a path"),
        ("surrogate.jsonl", b'{"path": "\\ud800"}', "cannot be read"),
    ],
)
def test_a_manifest_that_has_no_paths_is_refused(
    folder: Path, name: str, content: bytes, why: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=why):
        list_items([str(folder / name)])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_manifest_lists_paths_beside_it_and_elsewhere(folder: Path, kind: str) -> None:
    paths = ["a.mp3", str(folder / "c.flac"), "gone.mp3"]
    manifest = folder / f"list.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"audio_filepath": path, "duration": 1}) for path in [*paths, None]]
        manifest.write_text("\n".join([*lines, ""]))
    elif kind == "csv":
        manifest.write_text("id,path\n" + "".join(f"{i},{p}\n" for i, p in enumerate(paths)))
    else:
        manifest.write_bytes(parquet(path=paths))
    items = listed([str(manifest)])
    assert [item.path for item in items] == [str(folder / Path(p).name) for p in paths]
    assert [item.size for item in items] == [7, 7, 0]


def test_odd_names_in_a_folder_or_a_list_cost_themselves(folder: Path) -> None:
    """A name that is no UTF-8, which pyarrow refuses with its whole folder; and unknown URLs."""
    odd = os.fsencode(folder) + b"/caf\xe9.mp3"
    Path(os.fsdecode(odd)).write_bytes(b"x")
    (folder / "loop").symlink_to(folder)
    for name in (str(folder), f"{folder}/*.mp3"):
        items = listed([name])
        assert "caf\\xe9.mp3" in named(items)
        (item,) = [one for one in items if "caf" in one.relative]
        with pytest.raises(InvalidRequestError, match="not UTF-8"):
            heard(item)
    assert len(listed([str(folder)])) == 4
    bad, good = listed(["-"], ["nosuch://bucket/x.mp3\n", f"{folder}/a.mp3\n"])
    assert (bad.path, bad.size, good.size) == ("nosuch://bucket/x.mp3", 0, 7)


def test_a_folder_that_cannot_be_read_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InvalidRequestError, match="Permission denied"):
        listed([str(folder)])


def test_files_are_looked_at_as_they_are_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(100):
        (folder / f"{i:03d}.mp3").touch()
    looked: list[str] = []
    real = places._local

    def look(path: str) -> Place:
        looked.append(path)
        return real(path)

    monkeypatch.setattr(places, "_local", look)
    for name in (str(folder), f"{folder}/*.mp3"):
        looked.clear()
        listing = list_items([name])
        assert [next(listing).size for _ in range(3)] == [0, 0, 0]
        assert len(looked) <= 5
        assert len(list(listing)) >= 98


@pytest.mark.parametrize("name", ["in/a/../../../up.wav", "in/./../up.wav"])
def test_names_of_objects_lead_out_of_no_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    with fsspec.open("memory://outside/in/seed.txt", "wb") as file:
        file.write(b"x")
    store = fsspec.filesystem("memory").store
    monkeypatch.setitem(store, f"/outside/{name}", store["/outside/in/seed.txt"])
    for asked in ("memory://outside/in", "memory://outside/in/**/*.wav"):
        (item,) = listed([asked])
        assert item.path.endswith(name)
        assert item.relative in ("up.wav", "a/up.wav")
        assert heard(item) == b"x"

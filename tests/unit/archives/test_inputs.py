"""Names become items: folders, globs, manifests of three kinds, and what is not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.archives import places
from cluster.archives.inputs import UNKNOWN_BYTES, Item, list_items
from cluster.archives.item_transcriber import MOST_FILES, audio_of, blocks_of, embedded_audio
from cluster.archives.places import Place
from cluster.archives.transcriber import local_file
from cluster.errors import InvalidRequestError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.mp3", "deep/er/b.WAV", "deep/notes.txt", "c.flac"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 7)
    return tmp_path


def named(items: list[Item]) -> list[str]:
    return [item.relative for item in items]


def test_a_folder_is_its_audio_files_at_any_depth(folder: Path) -> None:
    items = list_items([str(folder)])
    assert named(items) == ["a.mp3", "c.flac", "deep/er/b.WAV"]
    assert {item.size for item in items} == {7}
    assert items[0].path == str(folder / "a.mp3")
    assert items[0].mtime_ns == (folder / "a.mp3").stat().st_mtime_ns


def test_a_file_named_twice_is_one_item(folder: Path) -> None:
    assert len(list_items([str(folder / "a.mp3"), str(folder), str(folder / "a*")])) == 3


def test_a_glob_may_go_deep(folder: Path) -> None:
    assert named(list_items([f"{folder}/**/*.WAV"])) == ["deep/er/b.WAV"]
    with pytest.raises(InvalidRequestError, match="no file matches"):
        list_items([f"{folder}/*.ogg"])


def test_a_folder_without_audio_is_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(InvalidRequestError, match="no audio file"):
        list_items([str(folder / "empty")])


def test_a_url_is_asked_of_its_own_filesystem(folder: Path) -> None:
    import fsspec

    with fsspec.open("memory://bucket/talks/d.mp3", "wb") as file:
        file.write(b"12345")
    (item,) = list_items(["memory://bucket/talks"])
    assert (item.size, item.relative) == (5, "d.mp3")
    assert item.path.startswith("memory://")
    with pytest.raises(InvalidRequestError, match="cannot be opened"):
        list_items(["nosuch://bucket/x.mp3"])


@pytest.mark.parametrize("root", ["memory://globs", "{folder}"])
def test_globs_mean_the_same_everywhere(folder: Path, root: str) -> None:
    """A star stops at a folder's end, two of them go on; a name with signs of globs is a name."""
    import fsspec

    root = root.format(folder=folder / "talks")
    for name in ("a.mp3", "in/b.mp3", "in/deep/c.mp3", "in/d[1].mp3"):
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(b"x")

    def found(name: str) -> list[str]:
        paths = [item.path for item in list_items([f"{root}/{name}"])]
        return sorted(path.rpartition("talks" if "talks" in path else "globs")[2] for path in paths)

    assert found("*.mp3") == ["/a.mp3"]
    assert found("*/b.mp3") == ["/in/b.mp3"]
    assert found("**/*.mp3") == ["/a.mp3", "/in/b.mp3", "/in/d[1].mp3", "/in/deep/c.mp3"]
    assert found("in/d[1].mp3") == ["/in/d[1].mp3"]
    assert found("in/[a-c].mp3") == ["/in/b.mp3"]


def test_a_file_url_is_a_path(folder: Path) -> None:
    (folder / "with space.mp3").write_bytes(b"x")
    for url in (f"file://{folder}/with space.mp3", f"file://{folder}/with%20space.mp3"):
        assert [item.path for item in list_items([url])] == [str(folder / "with space.mp3")]
    with pytest.raises(InvalidRequestError, match="no file of this machine"):
        list_items(["file://elsewhere/a.mp3"])


def test_options_of_a_bucket_go_with_every_name_in_it() -> None:
    options = "?region=eu-west-1&endpoint_override=127.0.0.1:9"
    place = Place.of(f"s3://talks/2026{options}")
    assert (place.path, place.name_of("talks/2026/a b?.mp3")) == (
        "talks/2026",
        f"s3://talks/2026/a b?.mp3{options}",
    )
    again = Place.of(place.name_of("talks/2026/a b?.mp3"))
    assert (again.path, again.files) == ("talks/2026/a b?.mp3", place.files)
    assert (place / "x").name == f"s3://talks/2026/x{options}"
    assert again.folder == place.name
    assert Place.of("gs://talks/what?.mp3").path == "talks/what?.mp3"


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
        list_items(["gs://splitscribe-has-no-such-bucket/talks"])


def test_manifests_that_match_a_glob_are_read(folder: Path) -> None:
    """As data sets of many parts come."""
    pq.write_table(pa.table({"bytes": [b"1", b"2"]}), folder / "part-0.parquet")
    pq.write_table(pa.table({"path": ["a.mp3"]}), folder / "part-1.parquet")
    items = list_items([f"{folder}/part-*.parquet"])
    assert named(items) == ["part-0/000000", "part-0/000001", "a.mp3"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bad.parquet", b"nothing"),
        ("bad.csv", b"path\n\xff\xfe\n"),
        ("bad.jsonl", b'{"path": \n'),
        ("number.jsonl", b'{"path": 7}\n'),
        ("wide.csv", b"id\n1\n"),
    ],
)
def test_a_manifest_that_is_none_is_refused_by_name(
    folder: Path, name: str, content: bytes
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(InvalidRequestError):
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
        pq.write_table(pa.table({"path": paths}), manifest)
    items = list_items([str(manifest)])
    assert [item.path for item in items] == [str(folder / Path(p).name) for p in paths]
    assert [item.size for item in items] == [7, 7, UNKNOWN_BYTES]


def test_standard_input_is_a_list(folder: Path) -> None:
    lines = [f"{folder}/a.mp3\n", "\n", json.dumps({"path": f"{folder}/c.flac"}) + "\n"]
    assert named(list_items(["-"], lines)) == ["a.mp3", "c.flac"]
    with pytest.raises(InvalidRequestError, match="no column of paths"):
        list_items(["-"], ['{"name": "x"}\n'])


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_file_may_hold_the_audio(folder: Path, nested: bool) -> None:
    audio = [f"sound {i}".encode() for i in range(5)]
    column = pa.array(audio) if not nested else pa.array([{"bytes": b, "path": "x"} for b in audio])
    file = folder / "set.parquet"
    pq.write_table(pa.table({"audio": column}), file, row_group_size=2)
    items = list_items([str(file)])
    assert [item.key for item in items] == [f"{file}#{i}" for i in range(5)]
    found = [embedded_audio(item.path, item.row, item.column) for item in items]
    assert found == audio


def test_odd_names_in_a_folder_or_a_list_cost_themselves(folder: Path) -> None:
    """A name that is no UTF-8, which pyarrow refuses with its whole folder; and unknown URLs."""
    odd = os.fsencode(folder) + b"/caf\xe9.mp3"
    Path(os.fsdecode(odd)).write_bytes(b"x")
    (folder / "loop").symlink_to(folder)
    for name in (str(folder), f"{folder}/*.mp3"):
        items = list_items([name])
        assert "caf\\xe9.mp3" in named(items)
        (item,) = [one for one in items if "caf" in one.path]
        with pytest.raises(InvalidRequestError, match="not UTF-8"), local_file(item.path):
            pass
    assert len(list_items([str(folder)])) == 4
    bad, good = list_items(["-"], ["nosuch://bucket/x.mp3\n", f"{folder}/a.mp3\n"])
    assert (bad.path, bad.size, good.size) == ("nosuch://bucket/x.mp3", UNKNOWN_BYTES, 7)


def test_a_folder_that_cannot_be_read_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not passed over."""
    real = os.scandir

    def scandir(path: str) -> Any:
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(InvalidRequestError, match="Permission denied"):
        list_items([str(folder)])


def test_a_row_without_audio_may_name_a_file(folder: Path) -> None:
    """As Hugging Face's data sets do; what cannot be read fails by itself, later."""
    rows = [{"bytes": None, "path": "a.mp3"}, {"bytes": b"sound", "path": "x"}]
    file = folder / "set.parquet"
    pq.write_table(pa.table({"audio": pa.array(rows)}), file)
    items = list_items([str(file)])
    found = [audio_of(item.path, item.row, item.column) for item in items]
    assert found == [(str(folder / "a.mp3"), None), (str(file), b"sound")]
    assert audio_of(str(file), 2, "audio") == (str(file), None)
    assert audio_of(str(folder / "a.mp3"), 0, "audio") == (str(folder / "a.mp3"), None)


def test_small_files_share_a_block_and_large_ones_do_not() -> None:
    sizes = [10**8, 10**7, *[16_000] * 40]
    items = [Item(f"/{i}.mp3", size, 0, f"{i}.mp3") for i, size in enumerate(sizes)]
    blocks = [[item[0] for item in json.loads(block)] for block in blocks_of(items)]
    assert [key for block in blocks for key in block] == [item.key for item in items]
    assert [len(block) for block in blocks] == [1, 1, MOST_FILES, MOST_FILES, 40 - 2 * MOST_FILES]

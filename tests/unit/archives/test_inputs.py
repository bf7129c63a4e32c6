"""Names become items: folders, globs, manifests of three kinds, and what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.archives.inputs import UNKNOWN_BYTES, Item, list_items
from cluster.archives.item_transcriber import MOST_FILES, blocks_of, embedded_audio
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


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_manifest_lists_paths_beside_it_and_elsewhere(folder: Path, kind: str) -> None:
    paths = ["a.mp3", str(folder / "c.flac"), "gone.mp3"]
    manifest = folder / f"list.{kind}"
    if kind == "jsonl":
        lines = [json.dumps({"audio_filepath": path, "duration": 1}) for path in paths]
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


def test_small_files_share_a_block_and_large_ones_do_not() -> None:
    sizes = [10**8, 10**7, *[16_000] * 40]
    items = [Item(f"/{i}.mp3", size, 0, f"{i}.mp3") for i, size in enumerate(sizes)]
    blocks = [[item[0] for item in json.loads(block)] for block in blocks_of(items)]
    assert [key for block in blocks for key in block] == [item.key for item in items]
    assert [len(block) for block in blocks] == [1, 1, MOST_FILES, MOST_FILES, 40 - 2 * MOST_FILES]

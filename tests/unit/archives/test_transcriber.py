"""What Ray Data calls: rows get their columns, failures cost one row."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cluster.archives import places, transcriber
from cluster.archives.transcriber import Transcriber, result_schema
from cluster.common.errors import ConfigurationError, InvalidRequestError
from tests.support.archives import FakeEngine

AUDIO = [b"one", b"broken", b"three"]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(transcriber, "engine_of_application", engine.opened)
    return engine


@pytest.fixture
def two_at_once(engine: FakeEngine) -> Iterator[Transcriber]:
    made = Transcriber(files_at_once=2)
    yield made
    made.close()


def test_a_batch_keeps_its_columns_and_gets_transcripts(two_at_once: Transcriber) -> None:
    table = two_at_once(pa.table({"bytes": AUDIO, "id": [0, 1, 2]}))
    assert table.column_names == ["bytes", "id", *result_schema().names]
    assert table["text"].to_pylist() == ["one", None, "three"]
    assert table["error"].to_pylist() == [None, "this is no audio", None]
    assert table["error_type"][1].as_py() == "InvalidAudioError"
    assert table["words"][0].as_py()[0]["word"] == " one"


def test_what_a_batch_says_of_its_columns_stays(two_at_once: Transcriber) -> None:
    """As data sets of pandas and Hugging Face do; a column of ours is replaced."""
    schema = pa.schema(
        [pa.field("bytes", pa.binary(), nullable=False), pa.field("text", pa.string())],
        metadata={"huggingface": "{}"},
    )
    table = two_at_once(pa.table({"bytes": [b"one"], "text": ["said"]}, schema))
    assert table.schema.metadata == {b"huggingface": b"{}"}
    assert not table.schema.field("bytes").nullable
    assert table["text"].to_pylist() == ["one"]


def test_paths_are_read_where_there_are_no_bytes(two_at_once: Transcriber, tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_text("of a path")
    paths = [str(tmp_path / "a.mp3"), str(tmp_path / "none.mp3"), None]
    table = two_at_once(pa.table({"path": pa.array(paths, pa.string())}))
    assert table["text"].to_pylist() == ["of a path", None, None]
    assert "no such file" in table["error"][1].as_py()


def test_calls_of_several_threads_share_the_bound(
    two_at_once: Transcriber, engine: FakeEngine
) -> None:
    batch = pa.table({"bytes": [b"x"] * 12})
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(two_at_once, [batch] * 4))) == 4
    assert len(engine.heard) == 48
    assert engine.most == 2


def test_rows_without_audio_and_refused_fields_are_told(two_at_once: Transcriber) -> None:
    with pytest.raises(InvalidRequestError, match="neither a column"):
        two_at_once(pa.table({"id": [1]}))
    with pytest.raises(InvalidRequestError, match="temperature"):
        Transcriber({"temperature": "9"})


def test_without_an_application_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def nothing() -> Any:
        raise ConfigurationError("the Ray cluster runs no application")
        yield

    monkeypatch.setattr(transcriber, "engine_of_application", nothing)
    with pytest.raises(ConfigurationError, match="runs no application"):
        Transcriber()


def test_without_the_extra_one_sentence_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install .*\[bulk\]"):
        places.require_bulk()

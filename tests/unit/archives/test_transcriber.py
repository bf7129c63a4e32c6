"""What Ray Data calls: rows of any batch format get their columns, failures cost one row."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.archives import item_transcriber, places
from cluster.archives.inputs import list_items
from cluster.archives.item_transcriber import BLOCK, ItemTranscriber, blocks_of
from cluster.archives.rows import RESULT_COLUMNS, row_of, transcript_of
from cluster.archives.transcriber import Transcriber, is_ours
from cluster.errors import ConfigurationError, InvalidRequestError
from cluster.serve.bulk.engine import BulkResult
from router.api.params import TranscriptionParams
from router.interface import StageTimings
from tests.support.archives import FakeEngine, make_transcript

AUDIO = [b"one", b"broken", b"three"]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def transcriber(engine: FakeEngine) -> Iterator[Transcriber]:
    made = Transcriber(files_at_once=2, open_engine=engine.opened)
    yield made
    made.close()


@pytest.mark.parametrize(
    "batch",
    [
        {"bytes": np.array(AUDIO, object), "id": np.arange(3)},
        pd.DataFrame({"bytes": AUDIO, "id": range(3)}),
        pa.table({"bytes": AUDIO, "id": [0, 1, 2]}),
    ],
    ids=["numpy", "pandas", "pyarrow"],
)
def test_a_batch_keeps_its_columns_and_gets_transcripts(
    transcriber: Transcriber, batch: Any
) -> None:
    table = transcriber(batch)
    assert table.column_names == ["bytes", "id", *RESULT_COLUMNS]
    assert table["text"].to_pylist() == ["one", None, "three"]
    assert table["error"].to_pylist() == [None, "this is no audio", None]
    assert table["error_type"][1].as_py() == "InvalidAudioError"
    assert table["words"][0].as_py()[0]["word"] == " one"


def test_paths_are_read_where_there_are_no_bytes(transcriber: Transcriber, tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_text("of a path")
    paths = [str(tmp_path / "a.mp3"), str(tmp_path / "none.mp3"), None]
    table = transcriber(pa.table({"path": pa.array(paths, pa.string())}))
    assert table["text"].to_pylist() == ["of a path", None, None]
    assert "no such file" in table["error"][1].as_py()


def test_calls_of_several_threads_share_the_bound(
    transcriber: Transcriber, engine: FakeEngine
) -> None:
    batch = pa.table({"bytes": [b"x"] * 12})
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(transcriber, [batch] * 4))) == 4
    assert len(engine.heard) == 48
    assert engine.most == 2


def test_threads_share_what_is_read_of_a_parquet_file(engine: FakeEngine, tmp_path: Path) -> None:
    """A row group is read whole, and may be large."""
    table = pa.table({"bytes": [f"talk {i}".encode() for i in range(40)]})
    pq.write_table(table, tmp_path / "talks.parquet", row_group_size=20)
    blocks = blocks_of(list_items([str(tmp_path / "talks.parquet")]))
    made = ItemTranscriber(open_engine=engine.opened)
    item_transcriber._group.cache_clear()
    try:
        with ThreadPoolExecutor(len(blocks)) as threads:
            tables = list(threads.map(made, [pa.table({BLOCK: [block]}) for block in blocks]))
    finally:
        made.close()
    assert [text for one in tables for text in one["text"].to_pylist()] == [
        f"talk {i}" for i in range(40)
    ]
    assert item_transcriber._group.cache_info().misses == 2


def test_rows_without_audio_and_refused_fields_end_the_call(engine: FakeEngine) -> None:
    refused = Transcriber({"temperature": "9"}, open_engine=engine.opened)
    try:
        with pytest.raises(InvalidRequestError, match="neither a column"):
            refused(pa.table({"id": [1]}))
        with pytest.raises(InvalidRequestError, match="temperature"):
            refused(pa.table({"bytes": [b"x"]}))
    finally:
        refused.close()


def test_without_an_application_the_call_ends() -> None:
    @asynccontextmanager
    async def nothing() -> Any:
        raise ConfigurationError("the Ray cluster runs no application")
        yield

    transcriber = Transcriber(open_engine=nothing)
    try:
        with pytest.raises(ConfigurationError):
            transcriber(pa.table({"bytes": [b"x"]}))
    finally:
        transcriber.close()


def test_a_row_gives_its_transcript_back() -> None:
    transcript = make_transcript("to and fro")
    result = BulkResult(transcript, StageTimings(), (), TranscriptionParams("m"))
    table = pa.Table.from_pylist([row_of(result)])
    assert transcript_of(table.to_pylist()[0]) == transcript


def test_without_the_extra_one_sentence_tells_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'splitscribe\[bulk\]'"):
        places.require_bulk()


def test_our_error_is_found_behind_those_of_others() -> None:
    ours, theirs = ConfigurationError("here"), RuntimeError("Ray Data's")
    theirs.__cause__ = ours
    assert is_ours(theirs) is ours
    assert is_ours(ValueError()) is None

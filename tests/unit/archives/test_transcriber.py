"""What Ray Data calls: rows get their columns, failures cost one row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from cluster.archives import transcriber
from cluster.archives.transcriber import Transcriber, result_schema
from cluster.common.errors import InvalidRequestError
from tests.support.archives import FakeEngine

AUDIO = [b"one", b"broken", b"three", None]


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
    table = two_at_once(pa.table({"bytes": AUDIO, "id": [0, 1, 2, 3]}))
    assert table.column_names == ["bytes", "id", *result_schema().names]
    assert table["text"].to_pylist() == ["one", None, "three", None]
    assert table["error"].to_pylist() == [None, "this is no audio", None, "the row has no audio"]
    assert table["error_type"][1].as_py() == "InvalidAudioError"
    answer = json.loads(table["answer"][0].as_py())
    assert (answer["text"], answer["segments"][0]["text"]) == ("one", " one")


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


def test_another_format_of_the_endpoint_is_the_answer(engine: FakeEngine) -> None:
    made = Transcriber({"response_format": "srt"})
    (answer,) = made(pa.table({"bytes": [b"one"]}))["answer"].to_pylist()
    assert answer.startswith("1\n00:00:00,000 --> ")
    made.close()


def test_calls_of_several_threads_share_the_bound(
    two_at_once: Transcriber, engine: FakeEngine
) -> None:
    batch = pa.table({"bytes": [b"x"] * 12})
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(two_at_once, [batch] * 4))) == 4
    assert len(engine.heard) == 48
    assert engine.most == 2


def test_rows_without_audio_and_refused_fields_are_told(two_at_once: Transcriber) -> None:
    with pytest.raises(InvalidRequestError, match="no column 'bytes'"):
        two_at_once(pa.table({"id": [1]}))
    with pytest.raises(InvalidRequestError, match="temperature"):
        Transcriber({"temperature": "9"})

"""One row of an archive's data set: a file, what was heard in it, or why nothing was.

Rows are plain dicts whose columns `schema` types; in a journal they are JSON. A row holds the whole
transcript, so that subtitles can be written of it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.errors import SplitscribeError
from router.transcript import Segment, Transcript, Word

if TYPE_CHECKING:
    from cluster.serve.bulk.engine import BulkResult

Row = dict[str, Any]

# Of a transcript, in the order of the data set; the columns of the archive stand before them.
RESULT_COLUMNS = (
    "text",
    "language",
    "duration",
    "segments",
    "words",
    "timings",
    "task",
    "error",
    "error_type",
    "retryable",
)
ITEM_COLUMNS = ("path", "size", "mtime_ns", "digest", "settings", "output", "finished_at")


def row_of(result: BulkResult) -> Row:
    """The columns of a transcript."""
    transcript = result.transcript
    return {
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "segments": [_segment(segment) for segment in transcript.segments],
        "words": [
            {"segment": segment.id, **asdict(word)}
            for segment in transcript.segments
            for word in segment.words
        ],
        "timings": {name: float(value) for name, value in asdict(result.timings).items()},
        "task": transcript.task,
        "error": None,
        "error_type": None,
        "retryable": False,
    }


def failed_row(error: Exception) -> Row:
    """The same columns for a file that failed. Whether a later try may do better is in it."""
    text = error.message if isinstance(error, SplitscribeError) else str(error)
    if isinstance(error, FileNotFoundError):
        text = f"there is no such file: {text}"
    return dict.fromkeys(RESULT_COLUMNS) | {
        "segments": [],
        "words": [],
        "error": " ".join(text.split()) or type(error).__name__,
        "error_type": type(error).__name__,
        "retryable": not isinstance(error, SplitscribeError) or error.status >= 500,
    }


def transcript_of(row: Mapping[str, Any]) -> Transcript:
    """The transcript of a row that did not fail."""
    words: dict[int, list[Word]] = {}
    for word in row["words"] or ():
        words.setdefault(word["segment"], []).append(
            Word(word["start"], word["end"], word["word"], word["probability"])
        )
    segments = tuple(
        Segment(**{**one, "tokens": tuple(one["tokens"]), "words": tuple(words.get(one["id"], ()))})
        for one in row["segments"] or ()
    )
    return Transcript(row["task"], row["language"], row["duration"], row["text"], segments)


def _segment(segment: Segment) -> dict[str, Any]:
    return {
        "id": segment.id,
        "seek": segment.seek,
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.tokens),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def result_fields() -> list[Any]:
    """pyarrow's fields of RESULT_COLUMNS."""
    import pyarrow as pa

    from router.interface import StageTimings

    number, text, whole = pa.float64(), pa.string(), pa.int64()
    numbers = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    segment = pa.struct(
        [
            ("id", whole),
            ("seek", whole),
            ("start", number),
            ("end", number),
            ("text", text),
            ("tokens", pa.list_(pa.int32())),
            *((name, number) for name in numbers),
        ]
    )
    word = pa.struct(
        [
            ("segment", whole),
            ("start", number),
            ("end", number),
            ("word", text),
            ("probability", number),
        ]
    )
    kinds = {
        "duration": number,
        "segments": pa.list_(segment),
        "words": pa.list_(word),
        "timings": pa.struct([(name, number) for name in StageTimings.__dataclass_fields__]),
        "retryable": pa.bool_(),
    }
    return [pa.field(name, kinds.get(name, text)) for name in RESULT_COLUMNS]


def archive_schema() -> Any:
    """pyarrow's schema of an archive's data set."""
    import pyarrow as pa

    kinds = {"size": pa.int64(), "mtime_ns": pa.int64()}
    return pa.schema(
        [pa.field(name, kinds.get(name, pa.string())) for name in ITEM_COLUMNS] + result_fields()
    )

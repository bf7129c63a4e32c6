"""One row of `Transcriber`: what was heard in a file, or why nothing was, as Ray Data has it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from cluster.common.errors import SplitscribeError
from router.api.formats import segment_bodies

if TYPE_CHECKING:
    from cluster.serve.bulk.engine import BulkResult

Row = dict[str, Any]

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


def row_of(result: BulkResult) -> Row:
    """The columns of a transcript."""
    transcript = result.transcript
    return {
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration_s,
        "segments": segment_bodies(transcript.segments),
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
    """The same columns for a file that failed."""
    return dict.fromkeys(RESULT_COLUMNS) | {
        "segments": [],
        "words": [],
        "error": error_text(error),
        "error_type": type(error).__name__,
        "retryable": may_pass(error),
    }


def error_text(error: Exception) -> str:
    """Why a file failed, in one line."""
    text = error.message if isinstance(error, SplitscribeError) else str(error)
    if isinstance(error, FileNotFoundError):
        text = f"there is no such file: {text}"
    return " ".join(text.split()) or type(error).__name__


def may_pass(error: Exception) -> bool:
    """Whether a later try may do better: it failed for no reason of the file's own."""
    return not isinstance(error, SplitscribeError) or error.status >= 500


def result_fields() -> list[Any]:
    """pyarrow's fields of RESULT_COLUMNS."""
    import pyarrow as pa

    from router.interface import StageTimings

    def struct(**kinds: Any) -> Any:
        return pa.struct(list(kinds.items()))

    number, text, whole = pa.float64(), pa.string(), pa.int64()
    scores = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    segment = {"id": whole, "seek": whole, "start": number, "end": number, "text": text}
    segment |= {"tokens": pa.list_(pa.int32())} | dict.fromkeys(scores, number)
    word = {"segment": whole, "start": number, "end": number, "word": text, "probability": number}
    kinds = {
        "duration": number,
        "segments": pa.list_(struct(**segment)),
        "words": pa.list_(struct(**word)),
        "timings": struct(**dict.fromkeys(StageTimings.__dataclass_fields__, number)),
        "retryable": pa.bool_(),
    }
    return [pa.field(name, kinds.get(name, text)) for name in RESULT_COLUMNS]

"""`Transcriber`: what Ray Data calls with batches of audio files, for pipelines of any kind.

    ds = ray.data.read_binary_files("s3://bucket/talks/", include_paths=True)
    ds = ds.map_batches(Transcriber, **map_options(fields={"language": "en"}))
    ds.drop_columns(["bytes"]).write_parquet("s3://bucket/texts")

The process must be in the Ray cluster of a running application (`splitscribe serve`). What a batch
had stays, and the columns of `result_schema` come beside it. A file that fails costs its row, which
tells why. The engine has an event loop and a thread of its own: Ray Data's blocks while its
consumer is slow.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

from anyio.from_thread import start_blocking_portal

from cluster.archives.outputs import FILES_AT_ONCE, Fields, error_text, may_pass, pairs_of
from cluster.common.errors import InvalidRequestError
from cluster.common.messages import Task
from cluster.common.priorities import run_when_idle
from cluster.serve.bulk.engine import engine_of_application
from router.api.formats import render

Row = dict[str, Any]


class Transcriber:
    """A class for `ray.data.Dataset.map_batches`; each object has one engine for all its calls."""

    def __init__(
        self,
        fields: Fields | None = None,
        task: Task = "transcribe",
        *,
        files_at_once: int = FILES_AT_ONCE,
    ) -> None:
        """Open an engine over the running application, without limits of size and length.

        fields: of the file endpoint, such as `{"language": "en"}`, with a list for those that take
        several; `response_format` is `verbose_json` where it is not among them. files_at_once: at
        most so many are worked on, over all calls.

        Raises ConfigurationError: there is no application. InvalidRequestError: the fields are
        refused.
        """
        asked = {"response_format": "verbose_json", **(fields or {})}
        self._slots = asyncio.Semaphore(files_at_once)
        with ExitStack() as opened:
            self._portal = opened.enter_context(start_blocking_portal(name="bulk"))
            opened.callback(self._portal.call, self._portal.stop, True)
            self._portal.call(run_when_idle)
            engine = self._portal.wrap_async_context_manager(engine_of_application())
            self._engine = opened.enter_context(engine)
            self._params = self._engine.params(pairs_of(asked), task)
            self._opened = opened.pop_all()

    def __call__(self, table: Any) -> Any:
        """Transcribe the rows of pyarrow's table. May be called by threads.

        The table has a column `bytes`, of audio. Returns the same rows, in order, with the
        transcripts' columns.
        """
        import pyarrow as pa

        if "bytes" not in table.column_names:
            has = ", ".join(table.column_names)
            raise InvalidRequestError(f"the rows have no column 'bytes' of audio: they have {has}")
        files = table["bytes"].to_pylist()
        heard = [self._portal.start_task_soon(self._transcribe, audio) for audio in files]
        rows = [one.result() for one in heard]
        found = pa.Table.from_pylist(rows, result_schema())
        replaced = [name for name in found.column_names if name in table.column_names]
        table = table.drop_columns(replaced)
        for field, column in zip(found.schema, found.columns, strict=True):
            table = table.append_column(field, column)
        return table

    def close(self) -> None:
        """End the engine and its audio workers; what is being transcribed is given up."""
        self._opened.close()

    async def _transcribe(self, audio: bytes | None) -> Row:
        async with self._slots:
            try:
                if audio is None:
                    raise InvalidRequestError("the row has no audio")
                # Without a name: logs of workers tell no file's, and files may share one.
                result = await self._engine.transcribe(audio, self._params)
            except Exception as error:
                told = {"error": error_text(error), "error_type": type(error).__name__}
                return {**told, "retryable": may_pass(error)}
        transcript = result.transcript
        answer, _ = render(transcript, self._params, result.logprobs)
        return {
            "text": transcript.text,
            "language": transcript.language,
            "duration": transcript.duration_s,
            "answer": answer.decode(),
            "retryable": False,
        }


def result_schema() -> Any:
    """pyarrow's, of what was heard in a file, or why nothing was: columns beside a row's own.

    answer: what the file endpoint answers, with segments and words. duration: in seconds.
    """
    import pyarrow as pa

    names = ("text", "language", "answer", "error", "error_type")
    columns: Row = dict.fromkeys(names, pa.string())
    return pa.schema([*columns.items(), ("duration", pa.float64()), ("retryable", pa.bool_())])


def map_options(
    fields: Fields | None = None,
    task: Task = "transcribe",
    *,
    transcribers: int = 1,
    files_at_once: int = FILES_AT_ONCE,
) -> dict[str, Any]:
    """Arguments of `map_batches(Transcriber, ...)`; transcribers: more for many machines.

    It asks Ray for no core: a cluster whose cores the application claims would never start it.
    """
    from ray.data import ActorPoolStrategy

    return {
        "fn_constructor_kwargs": {"fields": fields, "task": task, "files_at_once": files_at_once},
        "batch_format": "pyarrow",
        "batch_size": None,
        "compute": ActorPoolStrategy(
            size=transcribers,
            max_concurrent_calls_per_actor=files_at_once,
            max_tasks_in_flight_per_actor=2 * files_at_once,
            enable_true_multi_threading=True,
        ),
        "num_cpus": 0,
    }

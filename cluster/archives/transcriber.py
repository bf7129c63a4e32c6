"""Transcribe audio files in a pipeline of Ray Data, in the Ray cluster of a running application.

    ds = ray.data.read_binary_files("s3://bucket/talks/", include_paths=True)
    ds = ds.map_batches(Transcriber, **map_options(fields={"language": "en"}))
    ds.drop_columns(["bytes"]).write_parquet("s3://bucket/texts")

The engine has an event loop in a thread, since Ray Data's blocks while its consumer is slow.
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
    """For `ray.data.Dataset.map_batches`; a file that fails gives a row with the error."""

    def __init__(
        self,
        fields: Fields | None = None,
        task: Task = "transcribe",
        *,
        files_at_once: int = FILES_AT_ONCE,
    ) -> None:
        """Open an engine over the running application, without limits of size and length.

        fields: form fields of the file endpoint, such as `{"language": "en"}`; a list for one that
        may repeat. files_at_once: the most files in work, over all calls.

        Raises ConfigurationError: there is no application. InvalidRequestError: it refuses the
        fields.
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
        """Add the columns of `result_schema` to a pyarrow table with a column `bytes`.

        Rows keep their order. Threads may call this at once.
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
        """Stop the engine and its audio workers; files in work are abandoned."""
        self._opened.close()

    async def _transcribe(self, audio: bytes | None) -> Row:
        async with self._slots:
            try:
                if audio is None:
                    raise InvalidRequestError("the row has no audio")
                # Without a file name, which logs of workers must not hold.
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
    """answer: the body of the file endpoint's response. duration: in seconds."""
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
    """Arguments of `map_batches(Transcriber, ...)`; they reserve no core of Ray's.

    Ray would never start a transcriber that needs a core where the application claims all of them.
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

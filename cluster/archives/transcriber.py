"""`Transcriber`: what Ray Data calls with batches of paths or of audio, for pipelines of any kind.

    ds = ray.data.read_parquet("s3://bucket/talks.parquet")  # has a column `bytes` or `path`
    ds = ds.map_batches(Transcriber, **map_options(fields={"language": "en"}))
    ds.write_parquet("s3://bucket/texts")

The process must be in the Ray cluster of a running application (`splitscribe serve`). What a batch
had stays, and the columns of `cluster.archives.rows` come beside it. A file that fails costs its
row, which tells why. The engine has an event loop and a thread of its own: Ray Data's blocks while
its consumer is slow.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

from cluster.archives.archive import FILES_AT_ONCE, Fields, pairs_of
from cluster.archives.places import Place, require_bulk
from cluster.archives.rows import Row, failed_row, result_fields, row_of
from cluster.common.errors import InvalidRequestError
from cluster.common.messages import Task
from cluster.common.priorities import run_when_idle
from cluster.serve.bulk.application import connected_engine
from cluster.serve.bulk.engine import PATIENCE_S, BulkEngine
from router.api.params import TranscriptionParams

UNLIMITED: dict[str, Any] = {
    "max_upload_bytes": 2**50,
    "max_audio_s": PATIENCE_S,
    "min_audio_s": 0.0,
}
OpenEngine = Callable[[], AbstractAsyncContextManager[BulkEngine]]


class Transcriber:
    """A class for `ray.data.Dataset.map_batches`; each object has one engine for all its calls."""

    def __init__(
        self,
        fields: Fields | None = None,
        task: Task = "transcribe",
        *,
        files_at_once: int = FILES_AT_ONCE,
        path_column: str = "path",
        bytes_column: str = "bytes",
        open_engine: OpenEngine | None = None,
    ) -> None:
        """What is done with each file.

        Args:
            fields: of the file endpoint, such as `{"language": "en"}`, with a list for those
                that take several. The model is the application's first unless one is named.
            files_at_once: at most so many are worked on, over all calls.
            path_column: of paths that every node can open, or of URLs.
            bytes_column: of audio; a row's bytes go before its path.
            open_engine: None: of the running application, without limits of size and length.
        """
        require_bulk()
        self._fields = pairs_of(fields or {})
        self._task: Task = task
        self._columns = path_column, bytes_column
        self._open = open_engine or unlimited_engine
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="bulk")
        self._thread.start()
        self._slots = asyncio.Semaphore(files_at_once)
        self._opening = asyncio.Lock()
        self._opened = AsyncExitStack()
        self._engine: BulkEngine | None = None
        self._params: TranscriptionParams

    def __call__(self, batch: Any) -> Any:
        """Transcribe the rows of a batch in any of Ray Data's formats. May be called by threads.

        Returns:
            pyarrow's table of the same rows, in order, with the transcripts' columns.

        Raises:
            ConfigurationError: there is no application to ask.
            InvalidRequestError: the fields are refused, or there is neither column.
        """
        table = _as_table(batch)
        if not set(self._columns) & set(table.column_names):
            raise InvalidRequestError(
                f"the rows have neither a column {self._columns[0]!r} of paths nor "
                f"{self._columns[1]!r} of audio: they have {', '.join(table.column_names)}"
            )
        running = asyncio.run_coroutine_threadsafe(self._transcribe_all(table), self._loop)
        return running.result()

    def close(self) -> None:
        """End the engine and its audio workers; what is being transcribed is given up."""
        asyncio.run_coroutine_threadsafe(self._opened.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        run_when_idle()
        self._loop.run_forever()

    async def _transcribe_all(self, table: Any) -> Any:
        engine = await self._opened_engine()
        sources = table.select([name for name in self._columns if name in table.column_names])
        rows = await asyncio.gather(
            *(self._transcribe(engine, source) for source in sources.to_pylist())
        )
        return _beside(table, rows)

    async def _transcribe(self, engine: BulkEngine, source: Row) -> Row:
        path: str | None = source.get(self._columns[0])
        audio: Path | bytes | None = source.get(self._columns[1])
        async with self._slots:
            try:
                with ExitStack() as stack:
                    if audio is None:
                        if not path:
                            raise InvalidRequestError("the row has neither a path nor audio")
                        file = Place.of(path).as_local_file()
                        audio = await asyncio.to_thread(stack.enter_context, file)
                    # Without a name: logs of workers tell no file's, and files may share one.
                    return row_of(await engine.transcribe(audio, self._params))
            except Exception as error:
                return failed_row(error)

    async def _opened_engine(self) -> BulkEngine:
        async with self._opening:
            if self._engine is None:
                engine = await self._opened.enter_async_context(self._open())
                self._params = engine.params(self._fields, self._task)
                self._engine = engine
            return self._engine


def map_options(
    fields: Fields | None = None,
    task: Task = "transcribe",
    *,
    transcribers: int = 1,
    files_at_once: int = FILES_AT_ONCE,
    **more: Any,
) -> dict[str, Any]:
    """Arguments of `map_batches(Transcriber, ...)` beside a running application.

    It asks Ray for no core: what computes are the application's workers, which claim none
    either, and a cluster whose cores are all claimed would never start it.

    Args:
        transcribers: how many, each with audio workers of its own; more for many machines.
        files_at_once: in each of them. more: see `Transcriber`.
    """
    from ray.data import ActorPoolStrategy

    return {
        "fn_constructor_kwargs": {
            "fields": fields,
            "task": task,
            "files_at_once": files_at_once,
            **more,
        },
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


def unlimited_engine() -> AbstractAsyncContextManager[BulkEngine]:
    """Of the running application, for files of any size and length."""
    workers = max(2, (os.cpu_count() or 2) // 2)
    return connected_engine(**UNLIMITED, audio_workers=workers)


def _as_table(batch: Any) -> Any:
    import pandas as pd
    import pyarrow as pa

    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, pd.DataFrame):
        return pa.Table.from_pandas(batch, preserve_index=False)
    return pa.table({name: list(column) for name, column in batch.items()})


def _beside(table: Any, rows: Sequence[Row]) -> Any:
    """The table with the rows' columns in place of what had their names."""
    import pyarrow as pa

    for field in result_fields():
        column = pa.array([row[field.name] for row in rows], field.type)
        if field.name in table.column_names:
            table = table.drop_columns([field.name])
        table = table.append_column(field, column)
    return table

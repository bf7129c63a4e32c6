"""`Transcriber`: what Ray Data calls with batches of paths or of audio, for pipelines of any kind.

    ds = ray.data.read_parquet("s3://bucket/talks.parquet")  # has a column `bytes` or `path`
    ds = ds.map_batches(Transcriber, **map_options(fields={"language": "en"}))
    ds.write_parquet("s3://bucket/texts")

The process must be in the Ray cluster of a running application (`splitscribe serve`), or in a block
of `own_pools`. What a batch had stays, and the columns of `result_schema` come beside it. A file
that fails costs its row, which tells why. The engine has an event loop and a thread of its own: Ray
Data's blocks while its consumer is slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from cluster.archives.outputs import FILES_AT_ONCE, Fields, error_text, may_pass, pairs_of
from cluster.archives.places import Place, require_bulk
from cluster.common.errors import InvalidRequestError
from cluster.common.messages import Task
from cluster.common.priorities import run_when_idle
from cluster.common.settings_sources import load_settings
from cluster.serve.bulk.engine import engine_of_application
from router.api.formats import segment_bodies
from router.interface import StageTimings

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
        several. files_at_once: at most so many are worked on, over all calls.

        Raises ConfigurationError: there is no application. InvalidRequestError: the fields are
        refused.
        """
        require_bulk()
        self._slots = asyncio.Semaphore(files_at_once)
        with ExitStack() as opened:
            self._portal = opened.enter_context(start_blocking_portal(name="bulk"))
            opened.callback(self._portal.call, self._portal.stop, True)
            self._portal.call(run_when_idle)
            engine = self._portal.wrap_async_context_manager(engine_of_application())
            self._engine = opened.enter_context(engine)
            self._params = self._engine.params(pairs_of(fields or {}), task)
            self._opened = opened.pop_all()

    def __call__(self, table: Any) -> Any:
        """Transcribe the rows of pyarrow's table. May be called by threads.

        The table has a column `path`, of paths that every node can open or of URLs, or `bytes`, of
        audio, which goes before a row's path. Returns the same rows, in order, with the
        transcripts' columns.
        """
        import pyarrow as pa

        named = [name for name in ("path", "bytes") if name in table.column_names]
        if not named:
            raise InvalidRequestError(
                "the rows have neither a column 'path' of paths nor 'bytes' of audio: they have "
                + ", ".join(table.column_names)
            )
        rows = self._portal.call(self._transcribe_all, table.select(named).to_pylist())
        found = pa.Table.from_pylist(rows, result_schema())
        replaced = [name for name in found.column_names if name in table.column_names]
        table = table.drop_columns(replaced)
        for field, column in zip(found.schema, found.columns, strict=True):
            table = table.append_column(field, column)
        return table

    def close(self) -> None:
        """End the engine and its audio workers; what is being transcribed is given up."""
        self._opened.close()

    async def _transcribe_all(self, sources: list[Row]) -> list[Row]:
        return await asyncio.gather(*map(self._transcribe, sources))

    async def _transcribe(self, source: Row) -> Row:
        path: str | None = source.get("path")
        audio: Path | bytes | None = source.get("bytes")
        async with self._slots:
            try:
                with ExitStack() as stack:
                    if audio is None:
                        if not path:
                            raise InvalidRequestError("the row has neither a path nor audio")
                        file = Place.of(path).as_local_file()
                        audio = await asyncio.to_thread(stack.enter_context, file)
                    # Without a name: logs of workers tell no file's, and files may share one.
                    result = await self._engine.transcribe(audio, self._params)
            except Exception as error:
                told = {"error": error_text(error), "error_type": type(error).__name__}
                return {**told, "segments": [], "words": [], "retryable": may_pass(error)}
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
            "timings": asdict(result.timings),
            "task": transcript.task,
            "retryable": False,
        }


def result_schema() -> Any:
    """pyarrow's, of what was heard in a file, or why nothing was: columns beside a row's own."""
    import pyarrow as pa

    number, text, whole = pa.float64(), pa.string(), pa.int64()
    segment = {"id": whole, "seek": whole, "start": number, "end": number, "text": text}
    scores = ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    segment |= {"tokens": pa.list_(pa.int32())} | dict.fromkeys(scores, number) | {"speaker": text}
    word = {"segment": whole, "start": number, "end": number, "word": text, "probability": number}
    word["speaker"] = text
    timings = dict.fromkeys(StageTimings.__dataclass_fields__, number)
    columns = {
        "text": text,
        "language": text,
        "duration": number,
        "segments": pa.list_(pa.struct(list(segment.items()))),
        "words": pa.list_(pa.struct(list(word.items()))),
        "timings": pa.struct(list(timings.items())),
        "task": text,
        "error": text,
        "error_type": text,
        "retryable": pa.bool_(),
    }
    return pa.schema(list(columns.items()))


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


@contextmanager
def own_pools(model: str | None = None, *, config: Path | None = None) -> Iterator[None]:
    """Start pools, and a Ray cluster for them, which this process is in until the block is left.

    The process is in an empty folder meanwhile, since Ray imports from the one that it is in: name
    files by absolute paths. model: a folder, or a Hub id; None: that of `config` or the bundled
    one.
    """
    from cluster.serve.start.launch import running_cluster

    settings = load_settings(config, {"model": model, "router": {"port": 0}})
    with running_cluster(settings):
        yield

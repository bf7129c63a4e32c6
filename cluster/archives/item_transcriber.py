"""What Ray Data runs on an archive's items: takes audio out of Parquet files, and transcribes."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from cluster.archives.inputs import Item, beside
from cluster.archives.places import Place
from cluster.archives.transcriber import Transcriber, digest_of, local_file
from cluster.errors import InvalidRequestError

BLOCK = "block"
MOST_FILES, MOST_S = 16, 60.0  # of small files in one block


class ItemTranscriber:
    """Transcribes blocks that `blocks_of` makes; its arguments are those of `Transcriber`."""

    def __init__(self, **options: Any) -> None:
        self._transcriber = Transcriber(**options, digests=True)
        self._reading = threading.Lock()

    def __call__(self, table: Any) -> Any:
        """What is asked of a table with one column, BLOCK.

        Returns:
            pyarrow's table of all items of the blocks: `key`, `path`, transcripts, `digest`.
        """
        import pyarrow as pa

        items = [item for block in table[BLOCK].to_pylist() for item in json.loads(block)]
        with (
            self._reading
        ):  # or each thread would hold a row group of its own, and one may be large
            paths, contents = zip(*(audio_of(*item[1:]) for item in items), strict=True)
        columns = {
            "key": [item[0] for item in items],
            "path": pa.array(paths, pa.string()),
            "bytes": pa.array(contents, pa.binary()),
        }
        return self._transcriber(pa.table(columns)).drop_columns(["bytes"])

    def close(self) -> None:
        self._transcriber.close()


def audio_of(path: str, row: int, column: str) -> tuple[str, bytes | None]:
    """The path of an item's audio, and the audio itself where a Parquet file holds it.

    What cannot be read has its own path alone, and fails when that is transcribed.
    """
    if row < 0:
        return path, None
    try:
        audio = embedded_audio(path, row, column)
    except (OSError, ValueError):  # pyarrow's for what is damaged
        return path, None
    return (path, audio) if isinstance(audio, bytes) else (audio, None)


def item_digest(item: Item) -> str | None:
    """Of an item's content; None: it cannot be read."""
    path, content = audio_of(item.path, item.row, item.column)
    try:
        if content is not None:
            return digest_of(content)
        with local_file(path) as file:
            return digest_of(file)
    except (OSError, InvalidRequestError):
        return None


def embedded_audio(path: str, row: int, column: str) -> bytes | str:
    """The audio that a Parquet file holds in one row, or the path that stands there in its place.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    left = row
    for group, n_rows in enumerate(_groups(path)):
        if left < n_rows:
            value = _group(path, group, column)[left].as_py()
            if not isinstance(value, dict):
                return bytes(value or b"")
            if value.get("bytes") is None and value.get("path"):
                return beside(Place.of(path).folder, value["path"])
            return bytes(value.get("bytes") or b"")
        left -= n_rows
    raise OSError(f"{path} has no such row any more")


@lru_cache(maxsize=64)
def _groups(path: str) -> tuple[int, ...]:
    import pyarrow.parquet as pq

    place = Place.of(path)
    with place.files.open_input_file(place.path) as content:
        metadata = pq.ParquetFile(content).metadata
        return tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))


@lru_cache(maxsize=2)  # rows of one group come together
def _group(path: str, group: int, column: str) -> Any:
    import pyarrow.parquet as pq

    place = Place.of(path)
    with place.files.open_input_file(place.path) as content:
        return pq.ParquetFile(content).read_row_group(group, columns=[column]).column(0)


def blocks_of(items: Sequence[Item]) -> list[str]:
    """Items in their order as JSON, by blocks: a large file alone, small ones together."""
    blocks: list[list[Item]] = []
    seconds = MOST_S
    for item in items:
        if not blocks or seconds + item.about_s > MOST_S or len(blocks[-1]) == MOST_FILES:
            blocks.append([])
            seconds = 0.0
        blocks[-1].append(item)
        seconds += item.about_s
    return [json.dumps([[i.key, i.path, i.row, i.column] for i in block]) for block in blocks]


def stream_blocks(blocks: Sequence[str], options: Mapping[str, Any]) -> Iterator[Any]:
    """Take blocks through Ray Data, with these arguments of `map_batches`; yields tables.

    Blocks are made in this process. Ray Data makes most data sets by tasks that claim a core
    each, and where every core is claimed these would never run.
    """
    import ray.data

    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.CRITICAL)  # what fails is raised here, too
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [{BLOCK: block} for block in blocks]
    data = ray.data.from_items(rows, override_num_blocks=len(rows))
    done = data.map_batches(ItemTranscriber, **options)
    return iter(done.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0))

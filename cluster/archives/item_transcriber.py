"""What Ray Data runs on an archive's items: reads audio out of Parquet, digests, transcribes."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from cluster.archives.inputs import Item
from cluster.archives.places import Place
from cluster.archives.transcriber import Transcriber, digest_of

BLOCK = "block"
MOST_FILES, MOST_S = 16, 60.0  # of small files in one block


class ItemTranscriber:
    """Transcribes blocks that `blocks_of` makes; its arguments are those of `Transcriber`."""

    def __init__(self, **options: Any) -> None:
        self._transcriber = Transcriber(**options)

    def __call__(self, table: Any) -> Any:
        """What is asked of a table with one column, BLOCK.

        Returns:
            pyarrow's table of all items of the blocks: `key`, `path`, `digest`, transcripts.
        """
        import pyarrow as pa

        items = [item for block in table[BLOCK].to_pylist() for item in json.loads(block)]
        contents, digests = zip(*(_content(*item[1:]) for item in items), strict=True)
        columns = {
            "key": [item[0] for item in items],
            "path": [item[1] for item in items],
            "digest": pa.array(digests, pa.string()),
            "bytes": pa.array(contents, pa.binary()),
        }
        return self._transcriber(pa.table(columns)).drop_columns(["bytes"])

    def close(self) -> None:
        self._transcriber.close()


def _content(path: str, row: int, column: str) -> tuple[bytes | None, str | None]:
    """The audio, where a Parquet file holds it, and the digest of what this machine has.

    What cannot be read has neither: it fails when it is transcribed.
    """
    with suppress(OSError):
        if row >= 0:
            content = embedded_audio(path, row, column)
            return content, hashlib.blake2b(content, digest_size=16).hexdigest()
        if (place := Place.of(path)).is_local:
            return None, digest_of(place.local)
    return None if row < 0 else b"", None


def embedded_audio(path: str, row: int, column: str) -> bytes:
    """The audio that a Parquet file holds in one row. Raises OSError."""
    groups = _groups(path)
    for group, n_rows in enumerate(groups):
        if row < n_rows:
            value = _group(path, group, column)[row].as_py()
            content = value["bytes"] if isinstance(value, dict) else value
            return bytes(content or b"")
        row -= n_rows
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

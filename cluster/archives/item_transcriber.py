"""What Ray Data runs on an archive's items: reads audio out of Parquet, digests, transcribes."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import lru_cache
from typing import Any

from cluster.archives.inputs import Item
from cluster.archives.places import Place
from cluster.archives.transcriber import Transcriber, digest_of

MOST_FILES, MOST_S = 16, 60.0  # of small files in one block


class ItemTranscriber:
    """Transcribes tables that `blocks_of` makes; its arguments are those of `Transcriber`."""

    def __init__(self, **options: Any) -> None:
        self._transcriber = Transcriber(**options)

    def __call__(self, table: Any) -> Any:
        """Returns the table with a column `digest` and the transcripts' columns."""
        import pyarrow as pa

        contents: list[bytes | None] = []
        digests: list[str | None] = []
        for row in table.to_pylist():
            content = digest = None
            with suppress(OSError):
                if row["row"] >= 0:
                    content = embedded_audio(row["path"], row["row"], row["column"])
                    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
                elif (place := Place.of(row["path"])).is_local:
                    digest = digest_of(place.local)
            contents.append(content)
            digests.append(digest)
        table = table.append_column("bytes", pa.array(contents, pa.binary()))
        return (
            self._transcriber(table)
            .drop_columns(["bytes"])
            .append_column("digest", pa.array(digests, pa.string()))
        )

    def close(self) -> None:
        self._transcriber.close()


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


def blocks_of(items: list[Item]) -> list[Any]:
    """Tables of items, in their order: a large file alone, small ones together."""
    import pyarrow as pa

    blocks: list[list[Item]] = []
    seconds = MOST_S
    for item in items:
        if not blocks or seconds + item.about_s > MOST_S or len(blocks[-1]) == MOST_FILES:
            blocks.append([])
            seconds = 0.0
        blocks[-1].append(item)
        seconds += item.about_s
    return [
        pa.table(
            {
                "key": pa.array([one.key for one in block], pa.string()),
                "path": pa.array([one.path for one in block], pa.string()),
                "row": pa.array([one.row for one in block], pa.int64()),
                "column": pa.array([one.column for one in block], pa.string()),
            }
        )
        for block in blocks
    ]

"""A page of one key's rows, as OpenAI's lists have them. Runs in the database's thread.

Both tables have `id`, `owner` and `seq`, which grows with each row that is added.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Literal

from cluster.errors import InvalidRequestError
from router.batches.database import Database
from router.batches.interface import Item, Listing, Order


def read_page(
    database: Database,
    table: Literal["files", "batches"],
    owner: str,
    after: str | None,
    limit: int,
    make: Callable[[sqlite3.Row], Item],
    *,
    order: Order = "desc",
    where: tuple[str, ...] = (),
    values: tuple[object, ...] = (),
) -> Listing[Item]:
    """At most `limit` rows by the time of their creation, beginning behind the one called `after`.

    where, values: further conditions, and what stands for their question marks.

    Raises:
        InvalidRequestError: the key has no row called `after`.
    """
    conditions, given = ["owner = ?", *where], [owner, *values]
    if after is not None:
        found = database.first(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", after, owner)
        if found is None:
            raise InvalidRequestError(
                f"'after' names nothing that is listed here: {after[:64]!r}", param="after"
            )
        conditions.append("seq > ?" if order == "asc" else "seq < ?")
        given.append(found["seq"])
    rows = database.all(
        f"SELECT * FROM {table} WHERE {' AND '.join(conditions)}"
        f" ORDER BY seq {'ASC' if order == 'asc' else 'DESC'} LIMIT ?",
        *given,
        limit + 1,  # one more, which tells whether there are more
    )
    return Listing(tuple(map(make, rows[:limit])), len(rows) > limit)

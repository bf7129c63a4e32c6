"""Counts running uploads against the quota of their key. All functions run in `Database.call`."""

from __future__ import annotations

from cluster.common.errors import InsufficientStorageError
from router.batches.store import Store


def reserve(store: Store, owner: str, upload_id: str, n_bytes: int, most_bytes: int) -> None:
    """Count an upload as at least `n_bytes` until it is a file or is released. Raises
    InsufficientStorageError if the key's files and uploads would exceed `most_bytes`.
    """
    run = store.database.run
    reserved = run("SELECT bytes FROM uploads WHERE id = ?", upload_id).fetchone()
    if reserved is None or n_bytes > reserved[0]:
        (used,) = run(
            "SELECT (SELECT total(bytes) FROM files WHERE owner = ? AND id != ?)"
            " + (SELECT total(bytes) FROM uploads WHERE owner = ? AND id != ?)",
            *(owner, upload_id) * 2,
        ).fetchone()
        if used + n_bytes > most_bytes:
            raise InsufficientStorageError(
                f"The files of this API key take {used:.0f} bytes, of at most {most_bytes}, "
                f"uploads that run included; this one with {n_bytes} bytes does not fit. "
                "Delete files that are not needed.",
                code="storage_quota_exceeded",
            )
    run(
        "INSERT INTO uploads VALUES (?, ?, ?, ?) ON CONFLICT (id) DO UPDATE"
        " SET bytes = max(bytes, excluded.bytes), grew_at = excluded.grew_at",
        upload_id,
        owner,
        n_bytes,
        store.now,
    )


def release(store: Store, upload_id: str) -> None:
    store.database.run("DELETE FROM uploads WHERE id = ?", upload_id)


def forget_abandoned(store: Store, abandoned_s: float) -> None:
    store.database.run("DELETE FROM uploads WHERE grew_at < ?", store.now - abandoned_s)

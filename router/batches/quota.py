"""What each key's files may take: those that are there, and those that are on their way. An upload
counts from its beginning, by what its client announced or what has come, whichever is more.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.common.errors import InsufficientStorageError
from router.batches.blobs import ABANDONED_S
from router.batches.store import Store


@dataclass(slots=True)
class _Upload:
    """grew_at: Unix time."""

    owner: str
    n_bytes: int
    grew_at: int


class Quota:
    def __init__(self, store: Store, most_bytes: int) -> None:
        """most_bytes: of one key; 0 sets no limit."""
        self._store, self._most_bytes = store, most_bytes
        self._uploads: dict[str, _Upload] = {}

    async def reserve(self, owner: str, upload_id: str, n_bytes: int) -> None:
        """Let an upload have so many bytes, if it has not yet. Raises InsufficientStorageError."""
        upload = self._uploads.get(upload_id) or _Upload(owner, -1, self._store.now)
        upload.grew_at = self._store.now
        most = self._most_bytes
        if not most or n_bytes <= upload.n_bytes:
            return
        used = await self._store.database.call(self._store.used_bytes, owner, upload_id)
        used += sum(
            one.n_bytes
            for other_id, one in self._uploads.items()
            if one.owner == owner and other_id != upload_id
        )
        if used + n_bytes > most:
            raise InsufficientStorageError(
                f"The files of this API key take {used} bytes, of at most {most}, uploads that run "
                f"included; this one with {n_bytes} bytes does not fit. Delete files that are not "
                "needed.",
                code="storage_quota_exceeded",
            )
        upload.n_bytes = n_bytes
        self._uploads[upload_id] = upload

    async def grow(self, upload_id: str, n_bytes: int) -> None:
        """The same for an upload that was begun."""
        if upload := self._uploads.get(upload_id):
            await self.reserve(upload.owner, upload_id, n_bytes)

    def release(self, upload_id: str) -> None:
        """It is a file, or there is none."""
        self._uploads.pop(upload_id, None)

    def forget(self) -> None:
        """Release what was given up."""
        gone = self._store.now - ABANDONED_S
        for upload_id in [one for one, it in self._uploads.items() if it.grew_at < gone]:
            self.release(upload_id)

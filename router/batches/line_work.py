"""Runs one line of a batch like a request to its endpoint, with the priority `bulk`.

A failure becomes the line's result and is not retried here, since the engine has retried it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from cluster.common.errors import InsufficientStorageError, NotFoundError, SplitscribeError
from cluster.common.logs import request_scope
from router.api.batch_bodies import ENDPOINTS
from router.api.documents import (
    AUDIO_FIELD,
    MAX_URL,
    audio_of,
    decoded,
    is_data_url,
    pairs_of,
)
from router.api.params import Operation, TranscriptionParams
from router.api.responses import error_body
from router.audio.protocol import too_large
from router.batches.database import telling_full_disk
from router.batches.lines import (
    FILE_ID,
    SOURCES,
    Models,
    parse_line,
    request_id,
    result_of,
    source_of,
)
from router.batches.outbound import Downloads
from router.batches.owned import Owned
from router.batches.store import no_such_file
from router.batches.work_queue import Claim, Outcome

logger = logging.getLogger(__name__)

MAX_CLAIMS = 5  # a line fails after this many owners died while they ran it
AUDIO_PARAM = "file"  # the name of the audio field in the errors of the engine


class BulkTranscriber(Protocol):
    @property
    def models(self) -> Models: ...

    def params(
        self, fields: Iterable[tuple[str, str]], task: Operation = "transcribe"
    ) -> TranscriptionParams:
        """Raises SplitscribeError."""

    async def transcribe(self, upload: Path, params: TranscriptionParams, *, name: str) -> Any:
        """Transcribe a file, however long it waits for workers. Return an object with `transcript`
        and `body()`. Raises SplitscribeError.
        """


class LineWork:
    def __init__(self, owned: Owned, engine: BulkTranscriber, downloads: Downloads) -> None:
        self._owned = owned
        self._engine = engine
        self._downloads = downloads

    async def run(self, claim: Claim) -> tuple[Outcome, str, float]:
        """Return the outcome, the line of the result file, and the seconds of audio.

        Raises InsufficientStorageError if the disk has no room for the line's audio now.
        """
        name = f"req_{request_id(claim.batch.id, claim.number)}"
        outcome: Outcome
        audio_s = 0.0
        with request_scope(name):
            try:
                done = await self._answer(claim, name)
                audio_s = done.transcript.transcribed_s
                outcome, status, body = "completed", 200, done.body()
            except InsufficientStorageError:
                raise
            except Exception as error:
                failure = (
                    error
                    if isinstance(error, SplitscribeError)
                    else SplitscribeError(
                        "The server had an error while processing this line.", code="internal_error"
                    )
                )
                logger.log(
                    logging.INFO if failure is error else logging.ERROR,
                    "line %d of %s failed: %s",
                    claim.number,
                    claim.batch.id,
                    failure.code or type(error).__name__,
                    exc_info=failure is not error,
                )
                outcome, status, body = "failed", failure.status, error_body(failure)
        result = result_of(claim.batch.id, claim.number, claim.custom_id, status, body)
        return outcome, result, audio_s

    async def _answer(self, claim: Claim, name: str) -> Any:
        if claim.attempts > MAX_CLAIMS:
            raise SplitscribeError(
                f"The server ended {MAX_CLAIMS} times while it ran this line.",
                code="line_lost",
            )
        body = await asyncio.to_thread(self._read, claim)
        source = source_of(body)
        pairs = pairs_of({name: value for name, value in body.items() if name not in SOURCES})
        params = self._engine.params(pairs, ENDPOINTS[claim.batch.endpoint])
        try:
            async with self._audio(claim, source, body.pop(source)) as path:
                return await self._engine.transcribe(path, params, name=name)
        except SplitscribeError as error:
            if error.param == AUDIO_PARAM:
                error.param = source
            raise

    def _read(self, claim: Claim) -> dict[str, Any]:
        blobs = self._owned.blobs
        content = blobs.read(claim.batch.input_file_id, claim.offset, claim.length)
        body: dict[str, Any] = parse_line(content)["body"]
        return body

    @asynccontextmanager
    async def _audio(self, claim: Claim, source: str, value: Any) -> AsyncIterator[Path]:
        # A thread of a cancelled run may still make its file, so each run has a name of its own.
        name = f"{request_id(claim.batch.id, claim.number)}-{secrets.token_hex(4)}"
        path = self._owned.blobs.fetched / name
        try:
            if source == FILE_ID:
                await self._link(claim, value, path)
            elif source == AUDIO_FIELD or is_data_url(value):
                text = audio_of({source: value}) if source == AUDIO_FIELD else value
                await asyncio.to_thread(self._decode, text, path, source)
                del text
            else:
                await self._downloads.fetch(value, path, source)
            del value  # frees the memory: both the text and the work may be long
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def _link(self, claim: Claim, file_id: str, path: Path) -> None:
        owned = self._owned
        try:
            await owned.store.database.call(owned.store.file, claim.batch.owner, file_id)
            await asyncio.to_thread(path.hardlink_to, owned.blobs.path(file_id))
        except (NotFoundError, FileNotFoundError):
            raise NotFoundError(no_such_file(file_id).message, param=FILE_ID) from None

    def _decode(self, text: str, path: Path, source: str) -> None:
        """Decode base64 into a file, piece by piece to limit the memory that it takes."""
        most, room = self._owned.settings.max_file_bytes, len(text) * 3 // 4
        if room > most + MAX_URL:
            raise too_large(most, room)
        self._owned.blobs.check_room(room)
        with telling_full_disk(), path.open("wb") as file:
            file.writelines(decoded(text, source))
        if (n_bytes := path.stat().st_size) > most:
            raise too_large(most, n_bytes)

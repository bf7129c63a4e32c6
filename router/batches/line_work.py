"""Runs one line of a batch: its audio, its fields, its transcript, its result.

It goes the way of an endpoint's request, through the same table of fields and the same transcriber,
in the class `bulk`. What is wrong with the line becomes its result; what is wrong with the cluster
is waited out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cluster.clock import SYSTEM_CLOCK, Clock
from cluster.errors import (
    InsufficientStorageError,
    InvalidRequestError,
    NotFoundError,
    SplitscribeError,
)
from cluster.logs import request_scope
from cluster.messages import Task
from router.api.batch_bodies import ENDPOINTS
from router.api.documents import (
    AUDIO_FIELD,
    DATA_PART,
    FORMAT_PART,
    check_audio,
    pairs_of,
)
from router.api.formats import RenderedTranscript
from router.api.kinds import shown
from router.api.params import TranscriptionParams
from router.audio.limits import too_large
from router.batches.blobs import Blobs
from router.batches.database import DatabaseThread, disk_full, is_full
from router.batches.line_table import Claim, Outcome
from router.batches.lines import (
    FILE_ID,
    SOURCES,
    BadLineError,
    parse_line,
    source_of,
)
from router.batches.outbound import Downloads
from router.batches.results import body_of, error_envelope, request_id, result_of
from router.batches.tables import Tables

logger = logging.getLogger(__name__)

MAX_CLAIMS = 5  # owners that may have died with it; then it fails
MAX_TRIES = 5  # of one owner, where the cluster fails; the engine has waited long itself by then
FIRST_PAUSE_S = 10.0  # doubled before each further try
AUDIO_PARAM = "file"  # as all that reads audio calls it


class BulkAnswer(Protocol):
    """What came of a file."""

    def rendered(self) -> RenderedTranscript:
        """The endpoint's answer."""


class BulkTranscriber(Protocol):
    """Does the work: `cluster.serve.bulk.engine.BulkEngine`."""

    def params(
        self, fields: Iterable[tuple[str, str]], task: Task = "transcribe"
    ) -> TranscriptionParams:
        """Check a line's fields as its endpoint does. Raises SplitscribeError."""

    async def transcribe(
        self, upload: Path, params: TranscriptionParams, *, name: str
    ) -> BulkAnswer:
        """Transcribe a file, however long it waits. Raises SplitscribeError."""


class _UnexpectedError(SplitscribeError):
    """A bug of ours; its traceback is in the log."""

    def __init__(self) -> None:
        super().__init__("The server had an error while processing this line.")


@dataclass(frozen=True, slots=True)
class _Request:
    """A line whose fields were checked."""

    params: TranscriptionParams
    source: str
    body: Mapping[str, Any]


class LineWork:
    """Runs lines; one for all of an owner."""

    def __init__(
        self,
        engine: BulkTranscriber,
        tables: Tables,
        thread: DatabaseThread,
        blobs: Blobs,
        downloads: Downloads,
        *,
        max_audio_bytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._tables = tables
        self._thread = thread
        self._blobs = blobs
        self._downloads = downloads
        self._max_audio_bytes = max_audio_bytes
        self._clock = clock

    async def run(self, claim: Claim) -> tuple[Outcome, str]:
        """Run a line to its end. Returns what it came to, and its line of the result's file.

        Raises:
            InsufficientStorageError: its audio does not fit onto the disk now.
        """
        name = f"req_{request_id(claim.batch_id, claim.number)}"
        with request_scope(name):
            try:
                if claim.attempts > MAX_CLAIMS:
                    raise SplitscribeError(
                        f"The server ended {MAX_CLAIMS} times while it worked on this line.",
                        code="line_lost",
                    )
                body = await self._answer(claim, name)
            except InsufficientStorageError:
                raise
            except Exception as error:
                failure = error if isinstance(error, SplitscribeError) else _UnexpectedError()
                logger.log(
                    logging.INFO if failure is error else logging.ERROR,
                    "line %d of %s failed: %s",
                    claim.number,
                    claim.batch_id,
                    failure.code or type(error).__name__,
                    exc_info=failure is not error,
                )
                status, body = failure.status, error_envelope(failure)
            else:
                status = 200
        outcome: Outcome = "completed" if status == 200 else "failed"
        return outcome, result_of(claim.batch_id, claim.number, claim.custom_id, status, body)

    async def _answer(self, claim: Claim, name: str) -> object:
        request = await self._read(claim)
        try:
            async with self._audio(claim, request) as path:
                done = await self._until_done(name, request.params, path)
        except SplitscribeError as error:
            if error.param == AUDIO_PARAM:
                error.param = request.source
            raise
        return body_of(done.rendered())

    async def _read(self, claim: Claim) -> _Request:
        with self._blobs.reading(claim.input_file_id):
            content = await asyncio.to_thread(
                self._blobs.read, claim.input_file_id, claim.offset, claim.length
            )
        try:
            body: dict[str, Any] = parse_line(content)["body"]
            source = source_of(body)
        except BadLineError as error:  # it was checked when the batch began
            raise InvalidRequestError(error.message, code=error.code) from None
        pairs = pairs_of({name: value for name, value in body.items() if name not in SOURCES})
        task: Task = "transcribe" if claim.endpoint == ENDPOINTS[0] else "translate"
        return _Request(self._engine.params(pairs, task), source, body)

    @asynccontextmanager
    async def _audio(self, claim: Claim, request: _Request) -> AsyncIterator[Path]:
        """Where the audio of a line is, while the context lasts."""
        value = request.body[request.source]
        if request.source == FILE_ID:
            now = int(time.time())
            await self._thread.call(self._find, claim.owner, value, now)
            with self._blobs.reading(value) as path:  # from here on its bytes stay
                await self._thread.call(self._find, claim.owner, value, now)
                yield path
            return
        path = self._blobs.fetched / request_id(claim.batch_id, claim.number)
        try:
            if request.source == AUDIO_FIELD:
                data = _data_of(value)
                await asyncio.to_thread(self._decode, data, path, request.source)
            elif value[:5].lower() == "data:":
                head, _, content = value.partition(",")
                if not head.lower().endswith(";base64"):
                    raise InvalidRequestError(
                        f"the data URL in '{request.source}' must be one with base64",
                        param=request.source,
                    )
                await asyncio.to_thread(self._decode, content, path, request.source)
            else:
                await self._downloads.fetch(value, path, request.source)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _find(self, owner: str, file_id: str, now: int) -> None:
        try:
            self._tables.files.get(owner, file_id, now)
        except NotFoundError as error:
            raise NotFoundError(error.message, param=FILE_ID) from None

    def _decode(self, text: object, path: Path, source: str) -> None:
        try:
            if not isinstance(text, str):
                raise ValueError("it is no text")
            content = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequestError(f"'{source}' is not base64: {error}", param=source) from None
        if len(content) > self._max_audio_bytes:
            raise too_large(self._max_audio_bytes, len(content))
        self._blobs.check_room(len(content))
        try:
            path.write_bytes(content)
        except OSError as error:
            if is_full(error):
                raise disk_full() from error
            raise

    async def _until_done(self, name: str, params: TranscriptionParams, path: Path) -> BulkAnswer:
        """Try until it is done, or fails by itself."""
        pause_s = FIRST_PAUSE_S
        for left in reversed(range(MAX_TRIES)):
            try:
                return await self._engine.transcribe(path, params, name=name)
            except SplitscribeError as error:
                if error.status < 500 or not left:
                    raise
                logger.warning("%s is tried again: %s", name, error.message)
            except Exception:
                logger.exception("%s failed", name)
                if not left:
                    raise _UnexpectedError from None
            await self._clock.sleep(pause_s * self._clock.random.uniform(0.5, 1.0))
            pause_s *= 2
        raise AssertionError("the last try returned or raised")


def _data_of(value: object) -> object:
    """What an `input_audio` has as its base64. Raises InvalidRequestError for another shape."""
    if not isinstance(value, dict):
        raise InvalidRequestError(
            f"'{AUDIO_FIELD}' must be an object of '{DATA_PART}', the file's bytes in base64, and "
            f"'{FORMAT_PART}', not {shown(value)}",
            param=AUDIO_FIELD,
            code="invalid_type",
        )
    check_audio({AUDIO_FIELD: {**value, DATA_PART: ""}}, has_data=True)
    return value.get(DATA_PART)

"""Messages between the router and audio workers, and the limits of an upload.

A message is one of the dataclasses below as JSON, for a window followed by its PCM, framed as by
`multiprocessing.connection`. Fields are validated and nothing is pickled, so a worker that an
upload has taken over can only send bounded numbers, text and samples. Imports no codec, no model.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from cluster.common import errors
from cluster.common.errors import (
    AudioTooShortError,
    InvalidAudioError,
    PayloadTooLargeError,
    SplitscribeError,
)
from cluster.common.messages import WINDOW_SAMPLES
from router.api.params import Chunking

MAX_MESSAGE_BYTES = 2**24  # turns of a week; other messages have a hundred bytes
MAX_PCM_BYTES = 2 * WINDOW_SAMPLES
MAX_VECTOR = 2_048  # components; known networks have at most 512
_LARGEST = 2**40  # far above real counts and lengths; sums stay exact

Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Component = Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
# A vector of length 1, and its number of samples of speech.
Voice = tuple[Annotated[tuple[Component, ...], Field(max_length=MAX_VECTOR)], Count]
Seconds = Annotated[float, Field(ge=0, le=_LARGEST, allow_inf_nan=False)]


# Processor time limit of one step, in which a worker's other uploads wait. Opening an honest file
# takes less than a second, and a million tags, which libav compares with one another, hours.
MAX_STEP_S = 10.0


@dataclass(frozen=True, slots=True)
class AudioLimits:
    max_upload_bytes: int
    max_audio_s: float
    min_audio_s: float
    max_busy_s: float  # processor time for decoding and finding windows
    memory_bytes: int  # that a worker may allocate beyond its idle size
    when_idle: bool = False  # only uses cores that nothing else wants
    speaker_model: str | None = None  # file of the speaker network

    def too_short(self) -> AudioTooShortError:
        least = f"Minimum audio length is {self.min_audio_s:g} seconds."
        why = least if self.min_audio_s else "There is no audio in it."
        return AudioTooShortError(f"Audio file is too short. {why}", param="file")

    def too_long(self) -> InvalidAudioError:
        return InvalidAudioError(
            f"The audio is longer than this server allows: {self.max_audio_s:g} s.",
            param="file",
            code="audio_too_long",
        )

    def too_slow(self) -> InvalidAudioError:
        return InvalidAudioError(
            f"The audio takes longer than {self.max_busy_s:g} s to decode, or a part of it longer "
            f"than {min(MAX_STEP_S, self.max_busy_s):g} s.",
            param="file",
        )

    def too_big(self) -> InvalidAudioError:
        megabytes = self.memory_bytes // 2**20
        return InvalidAudioError(
            f"The audio needs more than {megabytes} MB of memory to decode.", param="file"
        )


def path_of(descriptor: int) -> Path:
    """Path by which a worker opens a file without a name while it is open here."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@asynccontextmanager
async def as_file(content: bytes) -> AsyncIterator[Path]:
    """A temporary file without a name, which is gone when this process dies. Raises OSError."""
    with tempfile.TemporaryFile() as file:
        await asyncio.to_thread(file.write, content)
        await asyncio.to_thread(file.flush)
        yield path_of(file.fileno())


def too_large(limit_bytes: int, read_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"Maximum content size limit ({limit_bytes}) exceeded ({read_bytes} bytes read)"
    )


# ------------------------------------------------------------------ from the router to a worker


@dataclass(frozen=True, slots=True)
class SpeakerSearch:
    """Known voices, and how many voices an upload may have."""

    references: tuple[tuple[str, str], ...] = ()  # name, file
    least: int = 1
    most: int | None = None
    threshold: float = 0.15  # cosine distance between two voices of which much was heard
    is_one: bool = False  # a piece of a live session: find its voice and no turns

    @property
    def least_cosine(self) -> float:
        """Least cosine between a known voice and a heard one that is the same; both are noisy."""
        return (1 - self.threshold) / 2


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """Decode the file at `path` into windows cut at pauses or, with `n_mels`, into pieces of 30 s,
    with the largest log10 mel power in so many bins.
    """

    upload_id: int
    path: str
    n_mels: int | None = None
    chunking: Chunking | None = None  # as the client asked
    channel: int | None = None  # None: the mix of all
    survey: bool = False  # compare the channels, no windows
    credit: int = 0  # windows that the router accepts
    skip: int = 0  # windows that it already has
    speakers: SpeakerSearch | None = None  # turns instead of windows
    kind: Literal["open"] = "open"


@dataclass(frozen=True, slots=True)
class Order:
    kind: Literal["credit", "cancel"]
    upload_id: int


Command = OpenUpload | Order


# ------------------------------------------------------------------ from a worker to the router


@dataclass(frozen=True, slots=True)
class Opened:
    expected_s: Seconds | None  # length that its container states; may be wrong
    kind: Literal["opened"] = "opened"


@dataclass(frozen=True, slots=True)
class WindowFound:
    """The fields of `router.audio.windows.Window`; its PCM follows the message."""

    index: Count
    start_sample: Count
    is_faint: bool
    speech: tuple[tuple[Count, Count], ...] | None
    kind: Literal["window"] = "window"


@dataclass(frozen=True, slots=True)
class Finished:
    """The upload is decoded to its end.

    log_max: for `n_mels`. channels: see `ChannelSurvey.finish`. turns: (first sample, end, speaker
    number), with the references first and others in order of appearance.
    """

    n_samples: Count
    log_max: Annotated[float, Field(ge=-20, le=20)] = 0.0
    channels: tuple[Count | None, ...] = ()
    turns: tuple[tuple[Count, Count, Count], ...] = ()
    voice: Voice | None = None
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Failed:
    error_class: str
    message: str
    param: str | None
    code: str | None
    kind: Literal["failed"] = "failed"

    @classmethod
    def of(cls, error: SplitscribeError) -> Failed:
        return cls(type(error).__name__, error.message, error.param, error.code)

    def as_error(self) -> SplitscribeError:
        found = getattr(errors, self.error_class, None)
        if not (isinstance(found, type) and issubclass(found, SplitscribeError)):
            found = errors.WorkerError
        return found(self.message, param=self.param, code=self.code)


UploadEvent = Opened | WindowFound | Finished | Failed


@dataclass(frozen=True, slots=True)
class UploadReport:
    upload_id: Count
    busy_s: Seconds  # processor time so far
    event: Annotated[UploadEvent, Field(discriminator="kind")]
    kind: Literal["report"] = "report"


@dataclass(frozen=True, slots=True)
class Ready:
    kind: Literal["ready"] = "ready"


Report = Ready | UploadReport

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_REPORTS: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def pack(message: Command | Report) -> bytes:
    return json.dumps(asdict(message), separators=(",", ":")).encode()


def unpack_command(content: bytes) -> Command:
    return _COMMANDS.validate_json(content, strict=True)


def unpack_report(content: bytes) -> Report:
    """Raises ValueError if it is not a valid message."""
    return _REPORTS.validate_json(content, strict=True)


class UploadSlot:
    """The upload that a worker is on, in shared memory, for the router to blame on a death."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        # Writes of a word are atomic for the other process.
        self._upload = memoryview(self._map).cast("Q")

    @staticmethod
    def make_file() -> int:
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            return os.dup(file.fileno())

    def set(self, upload_id: int) -> None:
        """0: none."""
        self._upload[0] = upload_id

    def get(self) -> int:
        return self._upload[0]

    def close(self) -> None:
        self._upload.release()
        self._map.close()

"""The messages between the router and an audio worker, and the limits of an upload.

Each message over their socket pair is one of the dataclasses below, as a JSON object, and for a
window followed by its PCM, framed as `multiprocessing.connection` does it. What arrives is checked
against the types of its fields. There is no pickle, so a worker that a hostile upload has taken
over can send nothing but text and samples, with numbers inside the bounds declared here. Imports no
codec and no model, so that the router stays light.
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

MAX_MESSAGE_BYTES = 2**24  # turns of a week, where most others have a hundred bytes
MAX_PCM_BYTES = 2 * WINDOW_SAMPLES
MAX_VECTOR = 2_048  # components; what is known has at most 512
_LARGEST = 2**40  # no count and no length comes near to it, and sums stay exact

Count = Annotated[int, Field(ge=0, le=_LARGEST)]
Component = Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
# A vector of length 1, and of how many samples of speech it is.
Voice = tuple[Annotated[tuple[Component, ...], Field(max_length=MAX_VECTOR)], Count]
Seconds = Annotated[float, Field(ge=0, le=_LARGEST, allow_inf_nan=False)]


# Processor time of a worker in one step, in which its other uploads wait; its own timer ends it.
# To open an honest file takes less than a second; one of a million texts, which libav compares with
# one another, hours.
MAX_STEP_S = 10.0


@dataclass(frozen=True, slots=True)
class AudioLimits:
    max_upload_bytes: int
    max_audio_s: float
    min_audio_s: float
    max_busy_s: float  # processor time for decoding and finding windows
    memory_bytes: int  # that a worker may allocate beyond what it takes when idle
    when_idle: bool = False  # computes only while nobody else on the machine wants its core
    speaker_model: str | None = None  # file of the network that tells voices apart

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
    """By which a worker opens a file that has no name, as long as it is open here."""
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


@asynccontextmanager
async def as_file(content: bytes) -> AsyncIterator[Path]:
    """For a worker, a file without a name: nothing is left behind where this process is killed.

    Raises OSError.
    """
    with tempfile.TemporaryFile() as file:
        await asyncio.to_thread(file.write, content)
        await asyncio.to_thread(file.flush)
        yield path_of(file.fileno())


def too_large(limit_bytes: int, read_bytes: int) -> PayloadTooLargeError:
    """In OpenAI's words."""
    return PayloadTooLargeError(
        f"Maximum content size limit ({limit_bytes}) exceeded ({read_bytes} bytes read)"
    )


# ------------------------------------------------------------------ from the router to a worker


@dataclass(frozen=True, slots=True)
class SpeakerSearch:
    """Whose voices an upload is searched for, and how many there may be."""

    references: tuple[tuple[str, str], ...] = ()  # name, file
    least: int = 1
    most: int | None = None
    threshold: float = 0.15  # cosine distance that parts two of which much was heard
    is_one: bool = False  # a piece of a live session: its voice is wanted, and no turns

    @property
    def least_cosine(self) -> float:
        """Of a voice that is known and what was heard of it: both are noisy."""
        return (1 - self.threshold) / 2


@dataclass(frozen=True, slots=True)
class OpenUpload:
    """Decode the file at `path`.

    n_mels: None asks for windows cut at pauses; a number, for the whole audio in pieces of 30 s and
        for the largest log10 mel power in so many bins.
    """

    upload_id: int
    path: str
    n_mels: int | None = None
    chunking: Chunking | None = None  # the client's wish
    channel: int | None = None  # None: their mix
    survey: bool = False  # no windows, but what the channels are
    credit: int = 0  # windows that the router will take
    skip: int = 0  # windows that it has already
    speakers: SpeakerSearch | None = None  # asks for turns in place of windows
    kind: Literal["open"] = "open"


@dataclass(frozen=True, slots=True)
class Order:
    """What follows for an upload."""

    kind: Literal["credit", "cancel"]
    upload_id: int


Command = OpenUpload | Order


# ------------------------------------------------------------------ from a worker to the router


@dataclass(frozen=True, slots=True)
class Opened:
    """The upload is audio."""

    expected_s: Seconds | None  # as its container states; it may be wrong
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

    log_max: of a whole one. channels: as of `ChannelSurvey.finish`. turns: first sample, end, and
    number of the speaker, the references' first, then as they appear. voice: of the one who is
    heard.
    """

    n_samples: Count
    log_max: Annotated[float, Field(ge=-20, le=20)] = 0.0
    channels: tuple[Count | None, ...] = ()
    turns: tuple[tuple[Count, Count, Count], ...] = ()
    voice: Voice | None = None
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Failed:
    """The upload cannot be decoded: a `SplitscribeError`."""

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
    """The worker has started, and takes uploads."""

    kind: Literal["ready"] = "ready"


Report = Ready | UploadReport

_COMMANDS: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="kind")])
_REPORTS: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


def pack(message: Command | Report) -> bytes:
    return json.dumps(asdict(message), separators=(",", ":")).encode()


def unpack_command(content: bytes) -> Command:
    return _COMMANDS.validate_json(content, strict=True)


def unpack_report(content: bytes) -> Report:
    """Raises ValueError: it is no message of a worker."""
    return _REPORTS.validate_json(content, strict=True)


class UploadSlot:
    """Which upload a worker is on, in shared bytes: after a death the router blames that one."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, mmap.PAGESIZE)
        # A word is written at once, so that the other process never sees half of it.
        self._upload = memoryview(self._map).cast("Q")

    @staticmethod
    def make_file() -> int:
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            return os.dup(file.fileno())

    def set(self, upload_id: int) -> None:
        """0 is none."""
        self._upload[0] = upload_id

    def get(self) -> int:
        return self._upload[0]

    def close(self) -> None:
        self._upload.release()
        self._map.close()

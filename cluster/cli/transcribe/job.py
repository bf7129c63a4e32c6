"""What the `transcribe` command is asked for, and the seam between its parts.

`command` makes a `Job` of flags, and `run` takes its files through a `TranscribeFile`; or it makes
a `LiveJob`, whose sound `live` sends to a `LiveClient`. `local` has either in this process,
`remote` that of a server. Nothing here does any work.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cluster.common.messages import Pcm
from router.api.params import TranscriptionParams
from router.api.subtitles import CueOptions
from router.transcript import Segment, Transcript

STDIN = "-"

Form = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Target:
    """Where the work is done: at `server`, or else in this process on `device`.

    threads: of torch, 0 takes every core; dtype: None leaves it to the device.
    """

    server: str | None = None
    api_key: str | None = None
    device: str = "auto"
    threads: int = 0
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What the command line asked for.

    form: the request's fields as the HTTP API takes them, without model, file and format: only
        what is not as usual, so that other OpenAI-compatible servers can be asked too.
    params: the same, parsed. jobs: files in work at a time. files: also folders, patterns, URLs and
        `-`. raw: they hold 16 kHz mono int16 samples without a header.
    """

    files: tuple[str, ...]
    form: Form
    params: TranscriptionParams
    cues: CueOptions
    output_dir: Path
    formats: tuple[str, ...]
    verbose: bool
    jobs: int
    target: Target
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Watcher:
    """Is told how a file goes: (seconds of audio done, seconds known), and segments in order."""

    progress: Callable[[float, float], None]
    segments: Callable[[Sequence[Segment]], None]


@dataclass(frozen=True, slots=True)
class Source:
    """Where the sound comes from.

    path: of a file, or `STDIN`; None: the microphone.
    pcm_rate: Hz, where the bytes are raw int16 mono samples, little-endian; 0: a container.
    """

    path: str | None = None
    pcm_rate: int = 0

    @property
    def name(self) -> str:
        return {None: "the microphone", STDIN: "standard input"}.get(self.path, str(self.path))


@dataclass(frozen=True, slots=True)
class LiveJob:
    """What the command line asked for. language: a code; None: detected for each turn."""

    source: Source
    model: str
    language: str | None
    prompt: str
    keywords: tuple[str, ...]
    target: Target


TranscribeFile = Callable[[Path, Watcher], Awaitable[Transcript]]


@dataclass(frozen=True, slots=True)
class Said:
    """Text that follows the text before, or the end of a turn.

    error: why the text of the turn that ended is incomplete; None if it is complete.
    """

    text: str = ""
    ends_turn: bool = False
    error: str | None = None


class LiveClient(Protocol):
    """A live session, wherever it runs."""

    rate: int  # Hz of the audio that it takes

    @property
    def unsent_s(self) -> float:
        """Seconds of audio that wait to be sent or transcribed."""

    async def append(self, pcm: Pcm) -> None:
        """Take audio: int16 [n_samples] at `rate`."""

    async def end(self) -> None:
        """Say that no more audio follows. `said` then ends after the last text."""

    def said(self) -> AsyncIterator[Said]:
        """The texts and ends of turns, in order."""

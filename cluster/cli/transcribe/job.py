"""A `transcribe` command as data, and its inputs as files.

`command` makes a `Job` for `run` or a `LiveJob` for `live`. `client` asks a server for the work;
`local` starts one in this process where the command names none.
"""

from __future__ import annotations

import glob
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from cluster.archives.inputs import BYTES_PER_S
from cluster.common.errors import InvalidRequestError
from router.api.params import TranscriptionParams
from router.api.subtitles import CueOptions
from router.audio.containers import wav_head
from router.live.interface import LiveConfig
from router.transcript import Segment, Transcript

ALIAS = "whisper-1"  # the name of every server's default model
STDIN = "-"
STDIN_NAME = "stdin"  # results are stdin.txt and so on
CONTAINERS = {  # by first bytes, which in mp4 follow four bytes of length
    b"fLaC": "flac",
    b"RIFF": "wav",
    b"ID3": "mp3",
    b"OggS": "ogg",
    b"ftyp": "mp4",
    b"\x1aE\xdf\xa3": "webm or mkv",
}
CONNECT_S = 10.0
SILENCE_S = 60.0  # the longest pause while a file is downloaded
PIECE_BYTES = 2**20

Form = dict[str, str | tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Target:
    server: str | None = None  # URL; None: one is started in this process
    api_key: str | None = None
    is_own: bool = False  # whether the server is in this process
    device: str = "auto"
    threads: int = 0  # of torch; 0: one for each core
    dtype: str | None = None  # None: the usual one of the device


@dataclass(frozen=True, slots=True)
class Job:
    """form: the request's fields without model, file and format, and only those with other values
    than the default, so that other servers accept it. params: the same, parsed. jobs: files in work
    at a time. raw: files hold 16 kHz mono int16 samples without a header.
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
    """progress: called with seconds of audio done and known. segments: called in order."""

    progress: Callable[[float, float], None]
    segments: Callable[[Sequence[Segment]], None]


@dataclass(frozen=True, slots=True)
class LiveJob:
    source: str | None  # a file or `STDIN`; None: the microphone
    config: LiveConfig
    target: Target
    raw: bool = False


TranscribeFile = Callable[[Path, Watcher], Awaitable[Transcript]]


@dataclass(frozen=True, slots=True)
class Input:
    """path: where the file is after `fetch`. shown: its name in messages. content: None for a file
    that is there. raw: samples without a header, to which `fetch` adds one.
    """

    path: Path
    shown: str
    content: Callable[[], Iterable[bytes]] | None = None
    raw: bool = False

    def fetch(self) -> None:
        """Raises InvalidRequestError: not available, or raw audio has a header. Or OSError."""
        if self.content is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("wb") as file:
            if self.raw:
                file.write(wav_head())
            file.writelines(self.content())
        if self.raw:
            _refuse_container(self.path)


@contextmanager
def inputs_of(names: Sequence[str], *, raw: bool) -> Iterator[tuple[Input, ...]]:
    """Every file that `names` mean, once; fetched files are deleted when the context ends.

    Raises InvalidRequestError: a folder or pattern has no audio file, or stdin is a terminal.
    """
    with tempfile.TemporaryDirectory(prefix="splitscribe-") as folder:
        found: dict[str, Input] = {}
        for name in names:
            for one in _inputs(name, Path(folder) / str(len(found)), raw):
                found.setdefault(one.shown if one.content else str(one.path.resolve()), one)
        yield tuple(found.values())


def _inputs(name: str, folder: Path, raw: bool) -> Iterable[Input]:
    if name == STDIN:
        if sys.stdin.isatty():
            raise InvalidRequestError("'-' reads from standard input: pipe a file into it")
        content = partial(_pieces, sys.stdin.buffer)
        return [Input(folder / STDIN_NAME, STDIN_NAME, content, raw)]
    if name.startswith(("http://", "https://")):
        return [Input(folder / _name_of(name), name, partial(_download, name), raw)]
    files = _files(name)
    if not raw:
        return [Input(file, str(file)) for file in files]
    return [
        Input(folder / str(i) / file.name, str(file), partial(_read, file), raw)
        for i, file in enumerate(files)
    ]


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix[1:].lower() in BYTES_PER_S)
        files = [file for file in files if file.is_file()]
        if not files:
            raise InvalidRequestError(f"there is no audio file in the folder {name}")
        return files
    if path.exists() or not glob.has_magic(name):
        return [path]  # a missing file is reported with other unreadable ones
    files = sorted(f for f in map(Path, glob.glob(name, recursive=True)) if f.is_file())
    if not files:
        raise InvalidRequestError(f"no file matches {name}")
    return files


def _name_of(url: str) -> str:
    parts = urlsplit(url)
    last = unquote(parts.path).replace("\\", "/").rstrip("/").rpartition("/")[2].replace("\0", "")
    return last if last.strip(".") else parts.hostname or "download"


def _read(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        yield from _pieces(content)


def _pieces(content: BinaryIO) -> Iterator[bytes]:
    return iter(partial(content.read, PIECE_BYTES), b"")


def _download(url: str) -> Iterator[bytes]:
    import httpx  # late, because its import is slow

    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
    try:
        with httpx.stream("GET", url, follow_redirects=True, timeout=timeout) as answer:
            answer.raise_for_status()
            yield from answer.iter_bytes()
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise InvalidRequestError(f"the server answers {status}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidRequestError(f"it cannot be fetched: {error}") from error


def _refuse_container(target: Path) -> None:
    """A file with a header of its own would be read as noise."""
    with target.open("rb") as file:
        file.seek(len(wav_head()))
        begin = file.read(8)
    for magic, name in CONTAINERS.items():
        if begin.startswith(magic) or (name == "mp4" and begin.endswith(magic)):
            raise InvalidRequestError(f"this is {name}, not headerless samples: leave out --raw")

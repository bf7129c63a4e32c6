"""What the `transcribe` command is given, as files: globs, folders, URLs and standard input.

Files of other places are brought into a temporary folder, under the name that their results shall
have. Headerless samples get a header on the way. Knows nothing of transcription.
"""

from __future__ import annotations

import glob
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from cluster.cli.transcribe.job import STDIN
from cluster.common.errors import InvalidRequestError
from router.audio.containers import wav_head

STDIN_NAME = "stdin"  # its results are stdin.txt and so on
SUFFIXES = frozenset(  # of the files in a folder that are taken
    f".{suffix}"
    for suffix in (
        *("3gp", "aac", "flac", "m4a", "m4b", "m4v", "mka", "mkv", "mov", "mp3", "mp4"),
        *("mpeg", "mpg", "mpga", "oga", "ogg", "opus", "wav", "webm"),
    )
)
CONNECT_S = 10.0
SILENCE_S = 60.0  # longest silence of a server that a file is fetched from


@dataclass(frozen=True, slots=True)
class Input:
    """One file of a job.

    path: where it is, or will be once `fetch` was called. shown: what people know it by.
    """

    path: Path
    shown: str
    fetch: Callable[[], None] | None = None


@contextmanager
def inputs_of(names: Sequence[str], *, raw: bool) -> Iterator[tuple[Input, ...]]:
    """Every file that `names` mean, each once; what is fetched is gone when the context ends.

    raw: they hold 16 kHz mono int16 samples without a header.

    Raises:
        InvalidRequestError: a folder or pattern has no audio file, or nothing is piped in.
    """
    with tempfile.TemporaryDirectory(prefix="splitscribe-") as folder:
        found: dict[str, Input] = {}
        for name in names:
            for one in _inputs(name, Path(folder) / str(len(found)), raw):
                found.setdefault(one.shown if one.fetch else str(one.path.resolve()), one)
        yield tuple(found.values())


def _inputs(name: str, folder: Path, raw: bool) -> Iterable[Input]:
    """What one argument means; `folder` is its own, and is not there yet."""
    if name == STDIN:
        if sys.stdin.isatty():
            raise InvalidRequestError("'-' reads from standard input: pipe a file into it")
        target = folder / STDIN_NAME
        return [Input(target, STDIN_NAME, partial(_keep, sys.stdin.buffer, target, raw))]
    if name.startswith(("http://", "https://")):
        target = folder / _name_of(name)
        return [Input(target, name, partial(_download, name, target, raw))]
    files = _files(name)
    if not raw:
        return [Input(file, str(file)) for file in files]
    return [
        Input(folder / str(i) / file.name, str(file), partial(_copy, file, folder / str(i)))
        for i, file in enumerate(files)
    ]


def _files(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES and f.is_file())
        if not files:
            raise InvalidRequestError(f"there is no audio file in the folder {name}")
        return files
    if path.exists() or not glob.has_magic(name):
        return [path]  # what is not there is told with the other files
    files = sorted(f for f in map(Path, glob.glob(name, recursive=True)) if f.is_file())
    if not files:
        raise InvalidRequestError(f"no file matches {name}")
    return files


def _name_of(url: str) -> str:
    """The file's name in a URL, else its host: harmless as a file name."""
    parts = urlsplit(url)
    last = unquote(parts.path).replace("\\", "/").rstrip("/").rpartition("/")[2].replace("\0", "")
    return last if last.strip(".") else parts.hostname or "download"


def _copy(file: Path, folder: Path) -> None:
    with file.open("rb") as content:
        _keep(content, folder / file.name, raw=True)


def _keep(content: BinaryIO, target: Path, raw: bool) -> None:
    with _new_file(target, raw) as file:
        shutil.copyfileobj(content, file)


def _download(url: str, target: Path, raw: bool) -> None:
    """Raises InvalidRequestError: the server has no such file, or does not answer."""
    import httpx  # takes longer to import than the rest of this module

    timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
    try:
        with (
            httpx.stream("GET", url, follow_redirects=True, timeout=timeout) as answer,
            _new_file(target, raw) as file,
        ):
            answer.raise_for_status()
            for piece in answer.iter_bytes():
                file.write(piece)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise InvalidRequestError(f"the server answers {status}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InvalidRequestError(f"it cannot be fetched: {error}") from error


def _new_file(target: Path, raw: bool) -> BinaryIO:
    target.parent.mkdir(parents=True, exist_ok=True)
    file = target.open("wb")
    if raw:
        file.write(wav_head())
    return file

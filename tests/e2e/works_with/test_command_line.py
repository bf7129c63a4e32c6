"""`splitscribe transcribe` in a shell's pipes: ffmpeg's samples, folders and URLs."""

from __future__ import annotations

import http.server
import shutil
import subprocess
import threading
from functools import partial
from pathlib import Path

import pytest

from cluster.demo.samples import sample_path
from tests.e2e.conftest import SPLITSCRIBE, Server
from tests.support.audio.speech import pcm_of
from tests.support.programs import needs

pytestmark = pytest.mark.slow
COMMAND_S = 120.0


def transcribe(
    server: Server, folder: Path, *arguments: str, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [SPLITSCRIBE, "transcribe", "--server", server.url, "-f", "txt", *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done


def read(file: Path) -> str:
    return " ".join(file.read_text().split())


@needs("ffmpeg")
def test_ffmpeg_s_samples_are_read_from_a_pipe(server: Server, said: str, tmp_path: Path) -> None:
    command = ("ffmpeg", "-loglevel", "error", "-i", str(sample_path("short")))
    samples = subprocess.run(
        [*command, "-f", "s16le", "-ac", "1", "-ar", "16000", "-"], capture_output=True, check=True
    ).stdout
    assert samples == pcm_of("short").tobytes()
    transcribe(server, tmp_path, "--raw", "-", "--output_dir", "texts", stdin=samples)
    assert read(tmp_path / "texts/stdin.txt") == said


def test_a_file_is_read_from_a_pipe(server: Server, said: str, tmp_path: Path) -> None:
    transcribe(server, tmp_path, "-", stdin=sample_path("short").read_bytes())
    assert read(tmp_path / "stdin.txt") == said


def test_a_folder_a_pattern_and_a_url_are_transcribed(
    server: Server, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "talks"
    folder.mkdir()
    for name in ("one.flac", "two.flac"):
        shutil.copy(sample_path("short"), folder / name)
    handler = partial(
        http.server.SimpleHTTPRequestHandler, directory=str(sample_path("short").parent)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{site.server_port}/short.flac"
        transcribe(server, tmp_path, "talks", "talks/o*.flac", url, "-o", "texts")
        site.shutdown()
    texts = {file.name: read(file) for file in (tmp_path / "texts").iterdir()}
    assert texts == {"one.txt": said, "two.txt": said, "short.txt": said}

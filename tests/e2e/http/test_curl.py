"""The examples of README.md, configs/README.md and /docs, run as they stand but for the address."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import soxr

from cluster.demo.samples import sample_path, sample_text, words_of
from router.api.openapi import TRANSCRIPTION_EXAMPLES, TRANSLATION_EXAMPLES
from tests.e2e.conftest import Server
from tests.support.audio.sounds import encode_as, write_wav
from tests.support.audio.speech import pcm_of
from tests.support.in_process import in_process_server, translating_model
from tests.support.programs import needs

ROOT = Path(__file__).resolve().parents[3]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "configs/README.md")}
ADDRESS = re.compile(r"https?://(?:localhost|127\.0\.0\.1|10\.0\.0\.10):8000")  # or a cluster's
RUN_S = 120

needs_curl = needs("curl")


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def curl_lines(text: str, kind: str) -> list[str]:
    lines = "\n".join(blocks(text, kind)).replace("\\\n", " ").splitlines()
    commands = [line.strip().removeprefix("$ ") for line in lines]
    return [command for command in commands if command.startswith("curl ")]


def run(command: str, url: str, folder: Path) -> str:
    assert ADDRESS.search(command), f"another server is asked: {command}"
    arguments = shlex.split(ADDRESS.sub(url, command))
    done = subprocess.run(
        [*arguments, "--fail-with-body", "--silent", "--show-error"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write_wav(folder / "speech.wav", pcm_of("short"))
    call = np.stack([pcm_of("short"), pcm_of("medium")[: len(pcm_of("short"))]])
    encode_as("wav", folder, call, "stereo").rename(folder / "call.wav")
    encode_as("mp3", folder, pcm_of("medium")).rename(folder / "talk.mp3")
    (folder / "talk.txt").write_text(sample_text("medium"))
    (folder / "speech-24khz.pcm").write_bytes(
        soxr.resample(pcm_of("short"), 16_000, 24_000).tobytes()
    )
    shutil.copytree(sample_path("short").parent, folder / "cluster/demo/samples")
    return folder


@needs_curl
@pytest.mark.parametrize(
    "command", [line for text in PAGES.values() for line in curl_lines(text, "console")]
)
def test_each_curl_line_of_the_pages_answers_with_a_text(
    server: Server, folder: Path, command: str
) -> None:
    assert json.loads(run(command, server.url, folder))["text"]


@needs_curl
def test_each_curl_line_of_the_docs_answers_with_a_text(folder: Path, tmp_path: Path) -> None:
    """By a model that translates, which the bundled one does not."""
    with in_process_server({"model": translating_model(tmp_path)}) as url:
        document = httpx.get(f"{url}/openapi.json").json()
        commands = curl_lines(document["info"]["description"], "")
        answers = {command: run(command, url, folder) for command in commands}
    assert len(answers) == len(TRANSCRIPTION_EXAMPLES) + len(TRANSLATION_EXAMPLES)
    last_word = words_of(sample_text("short"))[-1]
    for command, answer in answers.items():
        assert last_word in answer, f"{command}: {answer}"
    assert any(answer.startswith("1\n00:00:0") for answer in answers.values())
    assert any(answer.rstrip().endswith("data: [DONE]") for answer in answers.values())


@pytest.mark.parametrize(
    ("page", "printed"),
    [("README.md", r"^\d+\.\d+ \d+\.\d+  ?\S"), ("configs/README.md", r"^\S.*\w")],
    ids=list(PAGES),
)
def test_the_python_of_a_page_runs(server: Server, folder: Path, page: str, printed: str) -> None:
    """All its blocks one after the other; `test_batch.py` runs the one for Ray Data."""
    examples = [block for block in blocks(PAGES[page], "python") if "import ray" not in block]
    assert examples
    script = ADDRESS.sub(server.url, "\n".join(examples))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout, re.MULTILINE), done.stdout

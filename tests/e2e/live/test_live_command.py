"""`splitscribe transcribe --live` hears what is piped into it, here and through a server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import soundfile

from cluster.demo.samples import sample_path, sample_text
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow
COMMAND = Path(sys.executable).with_name("splitscribe")


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


@pytest.mark.parametrize("where", ["here", "server"])
def test_raw_samples_become_lines_of_words(server: Server, where: str) -> None:
    pcm, _ = soundfile.read(sample_path("medium"), dtype="int16")
    flags = ["--server", server.url] if where == "server" else ["--model", "demo"]
    done = subprocess.run(
        [str(COMMAND), "transcribe", "--live", "--raw", "-", "--language", "en", *flags],
        input=pcm.tobytes(),
        capture_output=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    said, true = words_of(text), words_of(sample_text("medium"))
    assert len(set(said) & set(true)) > 0.9 * len(set(true)), text
    assert abs(len(said) - len(true)) <= 0.1 * len(true), text
    assert text.endswith("\n")

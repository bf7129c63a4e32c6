"""`splitscribe transcribe --live` hears what is piped into it, here and through a server."""

from __future__ import annotations

import subprocess

import pytest

from cluster.demo.samples import sample_text, words_of
from tests.e2e.conftest import SPLITSCRIBE, Server
from tests.support.audio.speech import pcm_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("where", ["here", "server"])
def test_raw_samples_become_lines_of_words(server: Server, where: str) -> None:
    flags = ["--server", server.url] if where == "server" else ["--model", "demo"]
    done = subprocess.run(
        [SPLITSCRIBE, "transcribe", "--live", "--raw", "-", "--language", "en", *flags],
        input=pcm_of("medium").tobytes(),
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

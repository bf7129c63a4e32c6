"""`splitscribe transcribe` in a process of its own, ended by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import av
import numpy as np
import pytest

from benchmark.shared.speech.wav import wav_bytes
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import sample_path
from tests.e2e.conftest import SPLITSCRIBE

DEMO = ("--model", "demo", "--language", "en")


def write_long_recording(file: Path, seconds: int) -> None:
    with av.open(str(sample_path("long"))) as container:
        pcm = np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])
    repeated = np.resize(pcm.astype(np.int16), seconds * SAMPLE_RATE)
    file.write_bytes(wav_bytes(repeated))


def test_nobody_who_reads_on_costs_no_result(tmp_path: Path) -> None:
    """As behind `| head -0`: what is printed is lost, what is written is not."""
    names = ("short", "medium")
    process = subprocess.Popen(
        [SPLITSCRIBE, "transcribe", *(sample_path(name) for name in names), *DEMO],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        told = process.stderr.read()
        assert process.wait(timeout=100) == 0, told
    finally:
        process.kill()
    assert "Traceback" not in told
    assert "Error" not in told
    formats = ("txt", "vtt", "srt", "tsv", "json")
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in formats}


@pytest.mark.parametrize("decoding", ["parallel", "sequential"])
def test_ctrl_c_ends_it_cleanly_in_the_middle_of_a_file(tmp_path: Path, decoding: str) -> None:
    write_long_recording(tmp_path / "talk.wav", 900)
    flags = ("--threads", "1", "--decoding", decoding, *DEMO)
    process = subprocess.Popen(
        [SPLITSCRIBE, "transcribe", "talk.wav", *flags],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[00:0")  # it is at work
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "splitscribe: interrupted" in told
    assert "Traceback" not in told
    assert [file.name for file in tmp_path.iterdir()] == ["talk.wav"]

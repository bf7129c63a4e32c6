"""The command line as a person uses it: in a process of its own, in some folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmark.shared.speech.wav import wav_bytes
from cluster.cli.transcribe.command import FORMATS
from cluster.common.messages import SAMPLE_RATE
from cluster.demo.samples import SAMPLES, sample_path
from cluster.serve.distribution import package_root
from router.http.page import FOLDER
from tests.e2e.conftest import SPLITSCRIBE, Server, serving, wait_until
from tests.support.audio.speech import pcm_of

SHORT = str(sample_path("short"))


def splitscribe(
    *args: str, cwd: Path, env: dict[str, str] | None = None, timeout_s: float = 110
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SPLITSCRIBE, *args],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize(
    ("args", "env", "says"),
    [
        (("serve", "/no/such/folder"), {}, "no such folder"),
        (("serve",), {"SPLITSCRIBE_ROUTER__PROT": "1"}, "SPLITSCRIBE_ROUTER__PROT is no"),
        (("serve", "--transport", "memory", "--encoders", "2"), {}, "need NIXL"),
        (("batch", SHORT, "-o", "out", "--address", "127.0.0.1:9"), {}, "no Ray cluster answers"),
        (("transcribe", "none.wav"), {}, "No such file"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, args: tuple[str, ...], env: dict[str, str], says: str
) -> None:
    run = splitscribe(*args, cwd=tmp_path, env=env)
    assert run.returncode == 1
    assert says in run.stderr
    assert all(line.startswith("splitscribe: ") for line in run.stderr.splitlines())


def test_a_package_of_another_version_is_told(tmp_path: Path) -> None:
    """Ray's own way of telling an error of the driver waits for ever while Ray still runs."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "starlette.py").write_text("raise RuntimeError('this is another version')")
    run = splitscribe("serve", cwd=tmp_path, env={"PYTHONPATH": str(other)}, timeout_s=60)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith("Serve does not load: this is another version")


def test_check_tells_what_would_be_used(tmp_path: Path) -> None:
    run = splitscribe("check", cwd=tmp_path)
    assert run.returncode == 0, run.stdout
    assert "transport" in run.stdout
    assert "A cluster can run here" in run.stdout


def test_transcribe_in_process_and_through_a_server_agree(server: Server, tmp_path: Path) -> None:
    files = [str(sample_path(name)) for name in SAMPLES]
    alone = splitscribe(
        *("transcribe", *files, "--model", "demo", "-o", "alone", "--language", "en"), cwd=tmp_path
    )
    assert alone.returncode == 0, alone.stderr
    assert "a toy that knows 553 English words" in alone.stderr
    served = splitscribe(
        *("transcribe", *files, "-o", "served", "--language", "English", "--server", server.url),
        cwd=tmp_path,
    )
    assert served.returncode == 0, served.stderr
    assert "a toy that knows 553 English words" in served.stderr
    assert "a toy that knows 553 English words" in server.output()
    for name in SAMPLES:
        one = json.loads((tmp_path / "alone" / f"{name}.json").read_text())
        other = json.loads((tmp_path / "served" / f"{name}.json").read_text())
        assert one["text"] == other["text"]
        assert (tmp_path / "alone" / f"{name}.txt").read_text().split() == one["text"].split()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [(("--placement", "colocated"), "as set"), (("--transport", "memory"), "KV moves in memory")],
)
def test_one_worker_is_both_pools(tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    with serving(tmp_path, *flags) as running:
        client = running.client()
        asked: dict[str, Any] = {"model": "demo", "file": sample_path("short")}
        answer = client.audio.transcriptions.create(**asked)
        assert answer.text
        stream = client.audio.transcriptions.create(**asked, stream=True)
        assert list(stream)[-1].text == answer.text
        assert f"colocated ({reason})" in running.output()
        assert running.workers("decoder")[0]["transport"] == "memory"
        assert running.pid("encoder") == running.pid("decoder")
        with ThreadPoolExecutor(8) as several:
            files = [
                several.submit(
                    client.audio.transcriptions.create, model="demo", file=sample_path("long")
                )
                for _ in range(8)
            ]
            at_once = 0
            while not all(file.done() for file in files):
                at_once = max(at_once, running.workers("decoder")[0]["running"])
        assert at_once > 4
        wait_until(running.is_idle, 15.0, "every page free again")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_runs_the_same_in_a_clean_environment(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, package_root()], check=True)
    (wheel,) = tmp_path.glob("splitscribe-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("demo/checkpoint/model.safetensors", "demo/samples/long.flac"):
        assert f"cluster/{needed}" in names
    assert "configs/settings.yaml" in names
    assert {f"router/page/{file.name}" for file in FOLDER.iterdir() if file.is_file()} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmark/"))]

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    constraints = package_root() / "constraints.txt"
    subprocess.run(
        [python, "-m", "pip", "-q", "install", "-c", constraints, wheel], check=True, timeout=600
    )
    foreign = tmp_path / "foreign"
    (foreign / "cluster").mkdir(parents=True)
    (foreign / "cluster" / "__init__.py").write_text("raise SystemExit('foreign cluster')\n")
    (foreign / "router.py").write_text("raise SystemExit('foreign router')\n")
    run = subprocess.run(
        [python.with_name("splitscribe"), "demo"],
        cwd=foreign,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for name in SAMPLES:
        assert f"{name}.flac" in run.stdout
    assert run.stdout.count("words as spoken") + run.stdout.count("heard otherwise") == len(SAMPLES)


DEMO = ("--model", "demo", "--language", "en")


def started(*args: str, cwd: Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen([SPLITSCRIBE, *args], cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def test_nobody_who_reads_on_costs_no_result(tmp_path: Path) -> None:
    """As behind `| head -0`: what is printed is lost, what is written is not."""
    names = ("short", "medium")
    process = started(
        "transcribe", *(str(sample_path(name)) for name in names), *DEMO, cwd=tmp_path
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
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {f"{name}.{kind}" for name in names for kind in FORMATS}


@pytest.mark.parametrize("decoding", ["parallel", "sequential"])
def test_ctrl_c_ends_it_cleanly_in_the_middle_of_a_file(tmp_path: Path, decoding: str) -> None:
    pcm = np.resize(pcm_of("long"), 900 * SAMPLE_RATE)
    (tmp_path / "talk.wav").write_bytes(wav_bytes(pcm))
    flags = ("--threads", "1", "--decoding", decoding, *DEMO)
    process = started("transcribe", "talk.wav", *flags, cwd=tmp_path)
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

"""`splitscribe batch` and pipelines of Ray Data, beside a running server and without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster.demo.samples import SAMPLES, sample_path
from tests.e2e.conftest import SPLITSCRIBE, Server
from tests.e2e.test_cli import splitscribe
from tests.support.archive_files import make_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RUN_S = 900.0


def address_of(server: Server) -> str:
    flag = "--gcs-address="
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for arg in process.cmdline():
            if process.name() == "raylet" and arg.startswith(flag):
                return arg.removeprefix(flag)
    raise AssertionError("no raylet")


def start(
    archive: Path | str, output: Path | str, server: Server, *flags: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [SPLITSCRIBE, "batch", archive, "-o", output, "--address", address_of(server), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], status: int) -> str:
    try:
        told, _ = process.communicate(timeout=RUN_S)
    finally:
        process.kill()
    assert process.returncode == status, told
    return told


PIPELINE = """
import json, sys
import ray
from cluster.archives.transcriber import Transcriber, map_options
talks = ray.data.read_binary_files(sys.argv[1:], include_paths=True)
texts = talks.map_batches(Transcriber, **map_options({"language": "en"}))
print(json.dumps({row["path"]: row["text"] for row in texts.iter_rows()}))
"""


def test_a_pipeline_on_ray_data_hears_the_same(server: Server, tmp_path: Path) -> None:
    joins = {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    ran = subprocess.run(
        [sys.executable, "pipeline.py", *map(sample_path, SAMPLES)],
        cwd=tmp_path,
        env={**os.environ, **joins, "RAY_ADDRESS": address_of(server)},
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
    with server.client() as client:
        create = client.audio.transcriptions.create
        assert {Path(path).stem: text for path, text in found.items()} == {
            name: create(model="whisper-1", file=sample_path(name), language="en").text
            for name in SAMPLES
        }


def test_without_an_application_the_run_has_pools_of_its_own(tmp_path: Path) -> None:
    make_files(tmp_path / "talks", 2, 0)
    flags = ("-o", "texts", "-f", "txt", "--address", "none", "--model", "demo")
    ran = splitscribe("batch", "talks/*/*", *flags, cwd=tmp_path, timeout_s=RUN_S)
    assert ran.returncode == 0, ran.stderr
    assert "2 of 2 files have their transcripts" in ran.stdout
    texts = list((tmp_path / "texts").rglob("*.txt"))
    assert len(texts) == 2
    assert all(file.read_text().strip() for file in texts)

"""`splitscribe batch` and pipelines of Ray Data, beside a running server and without one."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster.demo.samples import SAMPLES, sample_path
from tests.e2e.conftest import SPLITSCRIBE, Server, wait_until
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


def sidecars(output: Path) -> dict[Path, dict[str, Any]]:
    end = ".splitscribe.json"
    found = {
        file.with_name(file.name.removeprefix(".").removesuffix(end)): json.loads(file.read_bytes())
        for file in output.rglob(f".*{end}")
    }
    assert len({one["source"]["path"] for one in found.values()}) == len(found)
    return found


def interrupt_when(process: subprocess.Popen[str], due: Callable[[], bool]) -> None:
    wait_until(lambda: due() or process.poll() is not None, RUN_S, "the run has kept enough", 0.02)
    process.send_signal(signal.SIGINT)
    finish(process, 130)


def test_an_archive_is_interrupted_and_goes_on(server: Server, tmp_path: Path) -> None:
    archive, output = tmp_path / "talks", tmp_path / "texts"
    make_files(archive, 12, 1)
    flags = ("-f", "json", "-f", "srt")
    first = start(archive, output, server, "--files-at-once", "1", *flags)
    interrupt_when(first, lambda: len(sidecars(output)) >= 2)
    n_first = len(sidecars(output))
    assert 2 <= n_first < 12
    told = finish(start(archive, output, server, *flags), 3)
    assert "11 of 12 files" in told
    kept = sidecars(output)
    assert len(kept) == 12
    (broken,) = [one for one in kept.values() if one["error"] is not None]
    failures = list(csv.reader((output / "failures.csv").open()))
    assert failures[1:] == [[broken["source"]["path"], broken["error"]]]
    assert len(list(output.rglob("*.srt"))) == 11
    wait_until(server.does_nothing, 30, "no window of the archive is left")

    again = finish(start(archive, output, server, *flags), 3)
    assert "0 to do" in again
    Path(broken["source"]["path"]).unlink()
    finish(start(archive, output, server, *flags), 0)


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

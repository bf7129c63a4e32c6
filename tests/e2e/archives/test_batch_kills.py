"""`splitscribe batch` while workers, its own process and the whole cluster are killed.

`pytest -s tests/e2e/archives/test_batch_kills.py` prints how long each took.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.archives.test_batch import finish, start
from tests.e2e.conftest import Server, start_server, stop_server, wait_until
from tests.support.archive_files import make_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

N_FILES = 160
RUN_S = 600.0
SIDECARS = ".*.splitscribe.json"
AT_ONCE = 8  # files in work at a time: the command's default
DECODED = re.compile(r"\b(bulk-[0-9a-f]{32})\b.* decoded at attempt ")


@pytest.fixture
def servers(kernels: None, tmp_path: Path) -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        if server.process.poll() is None:
            stop_server(server)


def new_server(servers: list[Server], folder: Path) -> Server:
    servers.append(start_server(folder, "--dtype", "float32"))
    return servers[-1]


def decoded(servers: list[Server]) -> set[str]:
    lines = [line for server in servers for line in server.lines]
    return {found[1] for line in lines if (found := DECODED.search(line))}


def kill_all(server: Server) -> None:
    first = psutil.Process(server.process.pid)
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    server.process.wait(30)


def n_kept(output: Path) -> int:
    return len(list(output.rglob(SIDECARS)))


def until_kept(output: Path, process: subprocess.Popen[str], n: int) -> None:
    def kept() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return n_kept(output) >= n

    wait_until(kept, RUN_S, f"{n} files are done", 0.02)


def test_nothing_is_lost_and_little_is_done_again(servers: list[Server], tmp_path: Path) -> None:
    files, output = make_files(tmp_path / "talks", N_FILES, 0), tmp_path / "texts"
    server = new_server(servers, tmp_path)
    first = start(files.folder, output, server)
    for n, role in ((20, "encoder"), (40, "decoder")):
        until_kept(output, first, n)
        os.kill(server.pid(role), signal.SIGKILL)
    until_kept(output, first, 60)
    first.kill()
    first.communicate()
    driver = n_kept(output)
    wait_until(server.does_nothing, 120, "what was in flight has ended")
    driver_again = len(decoded(servers)) - driver

    second = start(files.folder, output, server)
    until_kept(output, second, driver + 40)
    kill_all(server)
    began = time.monotonic()
    told, _ = second.communicate(timeout=RUN_S)
    print(f"the command ended {time.monotonic() - began:.1f} s after its cluster:\n{told}")
    assert second.returncode == 1, told
    assert "the Ray cluster has ended" in told
    assert "the same command goes on from here" in told
    cluster = n_kept(output)
    cluster_again = len(decoded(servers)) - driver_again - cluster

    told = finish(start(files.folder, output, new_server(servers, tmp_path)), 0)
    assert f"{cluster} done" in told, told
    assert f"{N_FILES} of {N_FILES} files" in told
    kept = [json.loads(file.read_text()) for file in output.rglob(SIDECARS)]
    assert len({one["source"]["path"] for one in kept}) == len(kept) == N_FILES
    assert not [one for one in kept if one["error"] is not None]
    print(
        f"of {N_FILES} files: {driver} were kept when the driver was killed, and {driver_again} "
        f"more were decoded; {cluster} when the cluster was, and {cluster_again} more"
    )
    assert driver_again <= 2 * AT_ONCE
    assert cluster_again <= 2 * AT_ONCE

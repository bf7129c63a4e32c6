"""300 files, one of three hours, by the command line: the file endpoint's answers and errors.

In float32, where a window's text does not depend on its batch.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.archives.test_batch import finish, sidecars, start
from tests.e2e.archives.test_batches import settings_of
from tests.e2e.conftest import Server, serving, wait_until
from tests.support.archive_files import ArchiveFiles, make_files, write_long
from tests.support.archives import same_answer
from tests.support.batches import ENDPOINT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

N_FILES, N_BROKEN, LONG_S = 300, 10, 3 * 3600
RUN_S = 900.0
SEED = 1  # of the samples of what is tried again; without one each request draws its own
Answers = dict[str, tuple[int, Any]]  # of the file endpoint, by path: status and document


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> ArchiveFiles:
    folder = tmp_path_factory.mktemp("archive") / "talks"
    folder.mkdir()
    return make_files(folder, N_FILES, N_BROKEN, LONG_S)


@pytest.fixture(scope="module")
def cluster(kernels: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cwd")
    with serving(folder, "--dtype", "float32", env=settings_of(folder / "kept")) as running:
        yield running


@pytest.fixture(scope="module")
def answers(cluster: Server, talks: ArchiveFiles) -> Answers:

    def ask(path: Path) -> tuple[int, Any]:
        answer = httpx.post(
            f"{cluster.url}{ENDPOINT}",
            data={"model": "whisper-1", "response_format": "verbose_json", "seed": SEED},
            files={"file": (path.name, path.read_bytes())},
            timeout=RUN_S,
        )
        return answer.status_code, answer.json()

    files = sorted(path for path in talks.folder.rglob("*") if path.is_file())
    assert len(files) == N_FILES
    with ThreadPoolExecutor(4) as threads:
        return dict(zip(map(str, files), threads.map(ask, files), strict=True))


def test_the_command_line(
    cluster: Server, talks: ArchiveFiles, answers: Answers, tmp_path: Path
) -> None:
    output = tmp_path / "texts"
    told = finish(start(talks.folder, output, cluster, "--seed", str(SEED)), 3)
    kept = sidecars(output)
    rows = {one["source"]["path"]: one | {"output": name} for name, one in kept.items()}
    n_failed = sum(row["error"] is not None for row in rows.values())
    assert f"{N_FILES - N_BROKEN} of {N_FILES} files" in told
    assert (len(rows), n_failed) == (N_FILES, N_BROKEN)
    assert float(str(rows[str(talks.long)]["duration"])) == pytest.approx(LONG_S, rel=0.01)
    for path, (status, answer) in answers.items():
        row = rows[path]
        if status == 200:
            written = json.loads(Path(f"{row['output']}.json").read_bytes())
            assert same_answer(written, answer), f"{path}:\n{written}\n{answer}"
        elif answer["error"]["code"] == "audio_too_short":  # here any length is long enough
            assert row["error"] == "Audio file is too short. There is no audio in it.", path
        else:
            assert row["error"] == " ".join(answer["error"]["message"].split()), path
    assert {path for path, (status, _) in answers.items() if status != 200} == {
        str(path) for path in talks.broken
    }
    wait_until(cluster.does_nothing, 60, "no window of the archive is left")


def test_a_long_file_tells_how_far_it_is(cluster: Server, tmp_path: Path) -> None:
    """Every half a minute, in which a fast machine does three hours."""
    talk = write_long(tmp_path / "talk.aac", 6 * 3600)
    process = start(talk, tmp_path / "texts", cluster)
    assert process.stdout is not None
    told: list[str] = []
    try:
        for line_ in process.stdout:
            told.append(line_)
            if re.search(r"0 of 1 file, [\d.]+ (s|min|h) of about [\d.]+ h of audio", line_):
                break
        process.send_signal(signal.SIGINT)
        told.append(finish(process, 130))
    finally:
        process.kill()
    assert re.search(r"0 of 1 file, [1-9].* hours per hour, .* to go", "".join(told)), told

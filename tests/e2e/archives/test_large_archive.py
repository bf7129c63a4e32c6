"""An archive of 300 files, one of three hours, by the command line and as a batch of OpenAI's SDK.

Both must give what the file endpoint answers, texts of the good files and errors of the broken
ones. The workers compute in float32, where a window's text does not depend on what else is in its
batch.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.archives.test_batch import finish, sidecars, start
from tests.e2e.archives.test_batches import OWNER, done, ended, processes, settings_of, upload
from tests.e2e.conftest import Server, start_server, stop_server, wait_until
from tests.support.archive_files import ArchiveFiles, make_files
from tests.support.archives import same_answer
from tests.support.batches import ENDPOINT, line

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
    running = start_server(folder, "--dtype", "float32", env=settings_of(folder / "kept"))
    try:
        yield running
    finally:
        status = stop_server(running)
    assert status == 0, running.output()[-4000:]


@pytest.fixture(scope="module")
def answers(cluster: Server, talks: ArchiveFiles) -> Answers:
    """What the file endpoint answers for every file."""

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


def test_a_batch_of_the_sdk(cluster: Server, talks: ArchiveFiles, answers: Answers) -> None:
    """The owner of batches is killed twice in the middle."""
    client = cluster.client(max_retries=0, timeout=RUN_S)

    def keep(path: str) -> str:
        return client.files.create(file=Path(path), purpose="user_data").id

    not_empty = [path for path in answers if os.path.getsize(path)]
    with ThreadPoolExecutor(4) as threads:
        ids = dict(zip(not_empty, threads.map(keep, not_empty), strict=True))
    lines = [
        line(path, file_id=file_id, response_format="verbose_json", seed=SEED)
        for path, file_id in ids.items()
    ]
    batch = upload(client, lines)
    for n_done in (60, 150):
        wait_until(lambda n=n_done: done(client, batch) >= n, RUN_S, f"{n_done} lines")
        for process in processes(cluster, OWNER):
            process.kill()
    batch = ended(client, batch.id, RUN_S)
    counts = batch.request_counts
    assert counts is not None
    n_broken = sum(answers[path][0] != 200 for path in ids)
    assert (batch.status, counts.total) == ("completed", len(ids))
    assert (counts.completed, counts.failed) == (len(ids) - n_broken, n_broken)
    results: Answers = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        assert file_id is not None
        for one in map(json.loads, client.files.content(file_id).text.splitlines()):
            assert one["custom_id"] not in results
            response = one["response"]
            results[one["custom_id"]] = response["status_code"], response["body"]
    assert results.keys() == ids.keys()
    for path, (status, body) in results.items():
        expected_status, expected = answers[path]
        assert status == expected_status, f"{path}: {body}"
        if status != 200:  # which tells the field that names the audio, and that is another one
            body["error"]["param"] = expected["error"]["param"]
        assert same_answer(body, expected), f"{path}:\n{body}\n{expected}"


def test_a_long_file_tells_how_far_it_is(
    cluster: Server, talks: ArchiveFiles, tmp_path: Path
) -> None:
    """Before its row is there, which for hours of audio takes a while."""
    assert talks.long is not None
    process = start(talks.long, tmp_path / "texts", cluster)
    assert process.stdout is not None
    told: list[str] = []
    try:
        for line_ in process.stdout:
            told.append(line_)
            if re.search(r"0 of 1 files, [\d.]+ (s|min|h) of about [\d.]+ h of audio", line_):
                break
        process.send_signal(signal.SIGINT)
        told.append(finish(process, 130))
    finally:
        process.kill()
    assert re.search(r"0 of 1 files, [1-9].* hours per hour, .* to go", "".join(told)), told

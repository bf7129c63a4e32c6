"""Batches over time: restarts, limits, full disks, what expires, who goes first."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from cluster.common.errors import (
    ConflictError,
    NotFoundError,
    OverloadedError,
    RateLimitError,
)
from router.api.batch_bodies import FileObject, UploadFields
from router.batches import runner
from router.batches.database import disk_full
from router.batches.line_work import MAX_CLAIMS
from router.batches.store import OpenBatch
from router.batches.work_queue import Outcome
from router.interface import TranscriptionResult
from tests.support.batches import (
    AUDIO,
    DEADLINE_S,
    HOUR_S,
    Hands,
    desk,
    eventually,
    line,
    outcome,
    talks,
)
from tests.support.router_fakes import FakeTranscriber


@pytest.fixture
def held() -> FakeTranscriber:
    """It works until it is cancelled, or `hold` is taken off."""
    transcriber = FakeTranscriber()
    transcriber.hold = True
    return transcriber


async def test_an_owner_that_is_killed_loses_no_line(tmp_path: Path, held: FakeTranscriber) -> None:
    """Nothing is given back: the database and its log are as a kill leaves them."""
    left = tmp_path / "left"
    async with desk(tmp_path / "first", held, concurrency=2) as first:
        batch_id = await first.create(await first.upload(talks(3)))
        await eventually(lambda: len(held.uploads) == 2)
        shutil.copytree(tmp_path / "first", left)
    held.hold = False
    async with desk(left, held) as second:
        batch = await second.ended(batch_id)
        assert outcome(batch) == ("completed", 3, 0)


async def test_a_line_that_ends_every_owner_fails_by_itself(
    tmp_path: Path, held: FakeTranscriber
) -> None:
    left = tmp_path / "left"
    async with desk(tmp_path / "first", held) as first:
        batch_id = await first.create(await first.upload(line("bad", **AUDIO)))
        await eventually(lambda: bool(held.uploads))
        database = first.service._owned.store.database
        await database.call(database.run, "UPDATE lines SET attempts = ?", MAX_CLAIMS)
        shutil.copytree(tmp_path / "first", left)
    async with desk(left, held) as second:
        batch = await second.ended(batch_id)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (0, 1)
        [error] = await second.content(batch.error_file_id)
        assert error["response"]["body"]["error"]["code"] == "line_lost"


class OnceOnly(FakeTranscriber):
    """Answers the first file, and works on the others until it is cancelled."""

    async def transcribe(self, *request: Any) -> TranscriptionResult:
        self.hold = bool(self.uploads)
        return await super().transcribe(*request)


async def test_what_the_window_leaves_out_is_told_as_expired(tmp_path: Path) -> None:
    transcriber, hands = OnceOnly(), Hands()
    async with desk(tmp_path, transcriber, hands, concurrency=1) as at:
        batch_id = await at.create(await at.upload(talks(3)))
        await eventually(lambda: len(transcriber.uploads) == 2)
        hands.pass_s(24 * HOUR_S)
        at.service._runner.look()
        batch = await at.ended(batch_id)
        assert outcome(batch) == ("expired", 1, 2)
        assert batch.expired_at is not None
        assert batch.expired_at >= batch.expires_at
        assert len(await at.content(batch.output_file_id)) == 1
        errors = await at.content(batch.error_file_id)
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert all(one["response"] is None for one in errors)


async def test_a_full_disk_pauses_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.05)
    monkeypatch.setattr(runner, "ROOM_S", 0.05)
    transcriber = FakeTranscriber()
    async with desk(tmp_path, transcriber) as at:
        input_id = await at.upload(talks(5))
        at.service._owned.blobs._min_free_bytes = 2**62
        batch_id = await at.create(input_id)
        batch = await at.until(batch_id, lambda batch: batch.paused is not None)
        assert batch.status == "in_progress"
        assert "full" in str(batch.paused)
        assert (await at.service.list_batches("", None, 1)).data[0].paused
        at.service._owned.blobs._min_free_bytes = 0
        batch = await at.ended(batch_id)
        assert (outcome(batch), batch.paused) == (("completed", 5, 0), None)


async def test_result_files_that_are_written_again_take_the_place_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each try on a full disk would leave one more file, which nobody knows of."""
    monkeypatch.setattr(runner, "ROOM_S", 0.01)
    async with desk(tmp_path) as at:
        store, left = at.service._owned.store, [disk_full()] * 3
        real_end = store.end

        def end(*values: Any) -> None:
            if left:
                raise left.pop()
            real_end(*values)

        monkeypatch.setattr(store, "end", end)
        input_id = await at.upload(line("a", **AUDIO) + line("b", file_id="file-none"))
        batch = await at.ended(await at.create(input_id))
        assert not left
        assert outcome(batch) == ("completed", 1, 1)
        kept = {one.name for one in (tmp_path / "files").iterdir()}
        assert kept == {input_id, batch.output_file_id, batch.error_file_id}


async def test_a_batch_that_ends_while_it_is_looked_at_is_not_finished_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path) as at:
        batch_runner, store, may_end = at.service._runner, at.service._owned.store, asyncio.Event()
        real_call, real_write, n_stale = batch_runner._call, batch_runner._write, 0

        async def write(batch: OpenBatch, outcome: Outcome) -> FileObject:
            await may_end.wait()
            return await real_write(batch, outcome)

        async def call(work: Any, *values: Any) -> Any:
            nonlocal n_stale
            found = await real_call(work, *values)
            is_open = work == store.open_batches and any(one.ends_as for one in found)
            if is_open and batch_runner._steps:
                n_stale += 1
                may_end.set()
                await eventually(lambda: not batch_runner._steps)
            return found

        monkeypatch.setattr(batch_runner, "_write", write)
        monkeypatch.setattr(batch_runner, "_call", call)
        batch = await at.run(line("a", **AUDIO))
        assert n_stale
        await eventually(lambda: batch_runner.n_open == 0)
        assert outcome(batch) == ("completed", 1, 0)
    assert "cannot go on" not in caplog.text


async def test_what_is_kept_goes_when_its_time_is_over(tmp_path: Path) -> None:
    hands = Hands()
    async with desk(tmp_path, hands=hands, retention_s=2 * HOUR_S) as at:
        file_id = await at.upload(b"content")
        input_id = await at.upload(line("a", **AUDIO))
        batch = await at.ended(await at.create(input_id, kept_s=5 * HOUR_S))
        hands.pass_s(2 * HOUR_S + 1)
        with pytest.raises(NotFoundError):
            await at.service.file("", file_id)
        os.utime(tmp_path / "files" / file_id, (0, 0))
        await at.service.clean()
        with pytest.raises(NotFoundError):
            await at.service.read(file_id, 0)
        assert len(await at.content(batch.output_file_id)) == 1
        with pytest.raises(NotFoundError):
            await at.state(batch.id)


async def test_a_batch_is_kept_for_a_time_that_begins_with_its_end(
    tmp_path: Path, held: FakeTranscriber
) -> None:
    """One that took longer than that would else be gone before anybody read its results."""
    hands = Hands()
    async with desk(tmp_path, held, hands, retention_s=HOUR_S) as at:
        batch_id = await at.create(await at.upload(line("a", **AUDIO)))
        await eventually(lambda: bool(held.uploads))
        hands.pass_s(3 * HOUR_S)
        held.hold = False
        for task in list(at.service._runner._lines):
            task.cancel()  # given back, and run again
        await at.ended(batch_id)
        hands.pass_s(HOUR_S - 1)
        await at.service.clean()
        batch = await at.state(batch_id)
        assert len(await at.content(batch.output_file_id)) == 1
        hands.pass_s(2)
        await at.service.clean()
        with pytest.raises(NotFoundError):
            await at.state(batch_id)


async def test_a_file_that_is_deleted_while_a_line_reads_it_is_read_to_its_end(
    tmp_path: Path, held: FakeTranscriber
) -> None:
    async with desk(tmp_path, held) as at:
        audio_id = await at.upload(b"RIFF")
        batch_id = await at.create(await at.upload(line("a", file_id=audio_id)))
        await eventually(lambda: bool(held.uploads))
        await at.service.delete_file("", audio_id)
        assert not (tmp_path / "files" / audio_id).exists()
        [kept] = (tmp_path / "fetched").iterdir()
        assert kept.read_bytes() == b"RIFF"
        await at.service.cancel_batch("", batch_id)
        await at.ended(batch_id)
        assert list((tmp_path / "fetched").iterdir()) == []


async def test_keys_take_turns(tmp_path: Path, held: FakeTranscriber) -> None:
    """A key with a large batch does not keep one with a small batch waiting."""
    async with desk(tmp_path, held, concurrency=2) as at:
        at.owner = "aa"
        first = await at.create(await at.upload(talks(20, language="de")))
        await eventually(lambda: len(held.uploads) == 2)
        at.owner = "bb"
        second = await at.create(await at.upload(line("s", language="en", **AUDIO)))
        await at.until(second, lambda batch: batch.status == "in_progress")
        held.hold = False
        for task in list(at.service._runner._lines):
            task.cancel()  # as if they had ended: they are given back
        assert (await at.ended(second)).request_counts.completed == 1
        at.owner = "aa"
        assert (await at.ended(first)).request_counts.completed == 20
    assert "en" in [params.language for params in held.params[2:5]]


async def test_a_key_has_only_so_many_batches(tmp_path: Path, held: FakeTranscriber) -> None:
    async with desk(tmp_path, held, max_batches_per_key=2) as at:
        input_id = await at.upload(line("a", **AUDIO))
        ids = [await at.create(input_id) for _ in range(2)]
        with pytest.raises(RateLimitError):
            await at.create(input_id)
        at.owner = "other"
        await at.create(await at.upload(line("a", **AUDIO)))
        at.owner = ""
        for batch_id in ids:
            await at.service.cancel_batch("", batch_id)
        await at.ended(ids[0])
        held.hold = False
        batch = await at.ended(await at.create(input_id))
        with pytest.raises(ConflictError, match="completed"):
            await at.service.cancel_batch("", batch.id)


async def test_inputs_are_checked_one_at_a_time_and_keys_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, running, checked = runner.check_input, threading.Semaphore(1), list[str]()
    begun, go_on = threading.Event(), threading.Event()

    def check(path: Path, *rules: Any) -> Any:
        assert running.acquire(blocking=False), "another check runs"
        begun.set()
        go_on.wait(DEADLINE_S)
        checked.append(path.name)
        found = real(path, *rules)
        running.release()
        return found

    monkeypatch.setattr(runner, "check_input", check)
    async with desk(tmp_path) as at:
        made = []
        for at.owner in ("aa", "aa", "aa", "bb"):
            file_id = await at.upload(line("a", **AUDIO))
            made.append((at.owner, file_id, await at.create(file_id)))
            await eventually(begun.is_set)
        go_on.set()
        for at.owner, _, batch_id in made:
            assert outcome(await at.ended(batch_id)) == ("completed", 1, 0)
    assert checked == [made[i][1] for i in (0, 3, 1, 2)]


async def test_what_was_cancelled_while_it_was_checked_counts_as_cancelled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, go_on = runner.check_input, threading.Event(), threading.Event()

    def check(*rules: Any) -> Any:
        begun.set()
        go_on.wait(DEADLINE_S)
        return real(*rules)

    monkeypatch.setattr(runner, "check_input", check)
    async with desk(tmp_path) as at:
        ends = list[str]()
        monkeypatch.setattr(at.service._runner, "_note_end", lambda _, status: ends.append(status))
        batch_id = await at.create(await at.upload(b"{"))
        await eventually(begun.is_set)
        await at.service.cancel_batch("", batch_id)
        go_on.set()
        assert (await at.ended(batch_id)).status == "cancelled"
        await eventually(lambda: bool(ends))
    assert ends == ["cancelled"]


async def test_repeated_calls_do_no_harm(tmp_path: Path) -> None:
    """A router that got no answer asks again."""
    async with desk(tmp_path) as at:
        content, fields = line("a", **AUDIO), UploadFields(purpose="batch")
        for offset, piece in ((0, content[:9]), (9, content[9:]), (9, content[9:])) * 2:
            await at.service.append("", "file-a", offset, piece)
        first, again = [
            await at.service.finish_upload("", "file-a", "a", len(content), fields)
            for _ in range(2)
        ]
        assert first == again
        assert await at.service.read("file-a", 0) == content
        for _ in range(2):
            await at.create("file-a", batch_id="batch_1")
        assert len((await at.service.list_batches("", None, 10)).data) == 1
        with pytest.raises(OverloadedError):
            await at.service.finish_upload("", "file-none", "a", 5, fields)


async def test_results_come_in_the_order_of_the_input(tmp_path: Path) -> None:
    """A result file is read and written page by page."""
    transcriber = FakeTranscriber()
    async with desk(tmp_path, transcriber, concurrency=8) as at:
        lines = b"".join(line(f"l{i}", file_id="file-none") for i in range(150))
        batch = await at.ended(await at.create(await at.upload(lines)))
        assert (batch.request_counts.total, batch.request_counts.failed) == (150, 150)
        assert batch.error_file_id is not None
        content = b""
        while piece := await at.service.read(batch.error_file_id, len(content)):
            content += piece
        ids = [json.loads(one)["custom_id"] for one in content.splitlines()]
        assert ids == [f"l{i}" for i in range(150)]

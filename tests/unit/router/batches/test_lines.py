"""Lines that are wrong: what fails a whole batch, with numbers, and what fails its line alone."""

from __future__ import annotations

import base64
import json
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cluster.common.errors import InvalidAudioError, OverloadedError, SequenceFailedError
from router.batches import runner
from router.batches.lines import MAX_ERRORS, CheckedInput, check_input
from router.batches.runner import MAX_CHECKS
from tests.support.batches import AUDIO, ENDPOINT, desk, eventually, line, outcome, talks
from tests.support.router_fakes import FakeTranscriber, make_registry


def checked(tmp_path: Path, *lines: bytes, max_lines: int = 1000) -> CheckedInput:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"".join(lines))
    return check_input(file, ENDPOINT, make_registry(FakeTranscriber()), max_lines)


def test_each_line_is_found_where_it_stands(tmp_path: Path) -> None:
    lines = [b"\xef\xbb\xbf" + line("ä", url="u"), b"  \r\n", line("b", file_id="f")[:-1]]
    found = checked(tmp_path, *lines)
    assert found.errors == []
    assert [(one.number, one.custom_id) for one in found.lines] == [(1, "ä"), (3, "b")]
    whole = b"".join(lines)
    for one in found.lines:
        part = whole[one.offset : one.offset + one.length]
        assert json.loads(part.decode("utf-8-sig"))["custom_id"] == one.custom_id


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"[1]\n", "invalid_json_line"),
        (b"\xff\n", "invalid_json_line"),
        (b"[" * 100_000 + b"\n", "invalid_json_line"),
        (line("a", file_id="f", junk=[[]] * 10_001), "invalid_json_line"),
        (b'\xff\xfe{\0"\0a\0"\0:\0"\0\\\0u\0d\0008\0000\0000\0"\0}\0', "invalid_json_line"),
        (line("a", file_id="f").replace(b"{", b'{"url": "x", ', 1), "invalid_json_line"),
        (line("a", file_id="f", prompt="x" * 2**20), "line_too_long"),
        (line("a", url="x" * 2**20), "invalid_url"),
        (b"{}\n", "missing_required_parameter"),
        (line("", file_id="f"), "missing_required_parameter"),
        (line("x" * 513, file_id="f"), "invalid_custom_id"),
        (line("a", file_id="f").replace(b"POST", b"GET"), "invalid_method"),
        (line("a", file_id="f").replace(b"{", b'{"n": 1, ', 1), "unknown_parameter"),
        (line("a", file_id="f", model=7), "missing_required_parameter"),
        (line("\ud800", file_id="f"), "invalid_json_line"),
        (line("a", file_id="f", **{"\ud83d": 1}), "invalid_json_line"),
        (line("a", file_id="f", model="nobody \U0001f600 \\ud800"), "model_not_found"),
        (b'{"\\ud800":1,"\\ud800":2}\n', "invalid_json_line"),
        (line("a", file_id=7), "invalid_type"),
        (line("a", file_id="f", **{"known_speaker_references[]": ["x"]}), "unsupported_value"),
        (b'{"custom_id":"a","method":"POST","url":"/v1/audio/transcriptions","body":[]}\n',
         "missing_required_parameter"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_told(tmp_path: Path, content: bytes, code: str) -> None:
    found = checked(tmp_path, line("good", file_id="f"), content)
    [error] = found.errors
    assert (error.line, error.code) == (2, code)
    assert error.message.encode()


def test_a_whole_file_may_be_wrong(tmp_path: Path) -> None:
    assert checked(tmp_path, b"\n \n").errors[0].code == "empty_file"
    five = [line(str(i), file_id="f") for i in range(5)]
    assert checked(tmp_path, *five, max_lines=5).errors == []
    [error] = checked(tmp_path, *five, max_lines=4).errors
    assert error.code == "too_many_lines"


def test_not_every_mistake_of_a_hopeless_file_is_told(tmp_path: Path) -> None:
    assert len(checked(tmp_path, b"x\n" * 50_000).errors) == MAX_ERRORS


@pytest.mark.parametrize("name", ["url", "file_url", "input_audio"])
async def test_what_holds_a_lines_audio_may_be_long(tmp_path: Path, name: str) -> None:
    content = base64.b64encode(bytes(2**20)).decode()
    source: Any = {"data": content}
    if name != "input_audio":
        source = f"data:audio/wav;base64,{content}"
    async with desk(tmp_path) as at:
        batch = await at.run(line("a", **{name: source}))
        assert outcome(batch) == ("completed", 1, 0)
        assert at.transcriber.uploads == [bytes(2**20)]


async def test_what_the_engine_gives_up_is_settled_at_once(tmp_path: Path) -> None:
    """It has tried again what may be tried again: once more would only kill more workers."""
    async with desk(tmp_path) as at:
        for error, status in (
            (OverloadedError("no worker could finish it"), 503),
            (SequenceFailedError("no probability"), 500),
            (InvalidAudioError("no audio", param="file"), 400),
        ):
            at.transcriber.error = error
            batch = await at.run(line("a", **AUDIO))
            [told] = await at.content(batch.error_file_id)
            assert told["response"]["status_code"] == status
            assert told["response"]["body"]["error"]["message"] == error.message
        assert told["response"]["body"]["error"]["param"] == "input_audio"
        assert len(at.transcriber.uploads) == 3


WRONG = (
    {"input_audio": "UklGRg=="},  # the text in place of the object
    {"input_audio": ["UklGRg=="]},
    {"input_audio": {"data": ["UklGRg=="]}},
    {"input_audio": {"data": "UklGRg==", "format": {}}},
    {"url": "http://[/a.wav"},
    {"url": "https://a\0b/"},
)


async def test_lines_that_are_wrong_end_and_starve_no_others(tmp_path: Path) -> None:
    """Those of their own batch, nor those of others."""
    async with desk(tmp_path, allowed_hosts=("*",)) as at:
        wrong = b"".join(line(f"w{i}", **WRONG[i % len(WRONG)]) for i in range(12))
        good = talks(4)
        at.owner = "aa"
        first = await at.create(await at.upload(wrong + good))
        at.owner = "bb"
        second = await at.create(await at.upload(good))
        assert (await at.ended(second)).request_counts.completed == 4
        at.owner = "aa"
        batch = await at.ended(first)
        assert outcome(batch) == ("completed", 4, 12)
        errors = await at.content(batch.error_file_id)
    assert {one["response"]["status_code"] for one in errors} == {400}
    found = {one["custom_id"]: one["response"]["body"]["error"] for one in errors}
    assert (found["w0"]["code"], found["w0"]["param"]) == ("invalid_type", "input_audio")
    assert "must be an object of 'data'" in found["w0"]["message"]
    assert found["w5"]["code"] == "invalid_url"


async def test_a_line_that_fails_unexpectedly_fails_once_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path, concurrency=1) as at:
        engine, tried = at.service._runner._work._engine, 0
        real = engine.params

        def params(pairs: Any, task: Any) -> Any:
            nonlocal tried
            pairs = tuple(pairs)
            if ("prompt", "a bug") in pairs:
                tried += 1
                raise TypeError("a bug")
            return real(pairs, task)

        monkeypatch.setattr(engine, "params", params)
        lines = line("bad", prompt="a bug", **AUDIO) + line("good", **AUDIO)
        batch = await at.run(lines)
        assert (batch.request_counts.completed, batch.request_counts.failed, tried) == (1, 1, 1)
        [error] = await at.content(batch.error_file_id)
        assert error["response"]["status_code"] == 500
        assert error["response"]["body"]["error"]["code"] == "internal_error"
        assert "a bug" not in str(error)
    assert "TypeError: a bug" in caplog.text


async def test_an_input_that_cannot_be_checked_fails_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LOOK_S", 0.01)
    real, tried = runner.check_input, 0

    def check(path: Path, *rules: Any) -> Any:
        nonlocal tried
        if b"poison" in path.read_bytes():
            tried += 1
            raise MemoryError
        return real(path, *rules)

    monkeypatch.setattr(runner, "check_input", check)
    async with desk(tmp_path) as at:
        bad = await at.create(await at.upload(line("poison", **AUDIO)))
        good = await at.create(await at.upload(line("a", **AUDIO)))
        assert (await at.ended(good)).request_counts.completed == 1
        batch = await at.ended(bad)
        assert (batch.status, tried) == ("failed", MAX_CHECKS)
        assert [one.code for one in batch.errors.data] == ["input_not_checked"]


async def test_an_input_that_ends_every_owner_fails_its_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check counts before it is made; one that ends with its owner's stop does not."""
    started, go_on, real = threading.Event(), threading.Event(), runner.check_input

    def check(*values: Any) -> Any:
        started.set()
        go_on.wait(20)
        return real(*values)

    monkeypatch.setattr(runner, "check_input", check)
    async with desk(tmp_path) as at:
        batch_id = await at.create(await at.upload(line("a", **AUDIO)))
        await eventually(started.is_set)
        store = at.service._owned.store
        [batch] = await store.database.call(store.open_batches)
        assert batch.checks == 1
    go_on.set()
    with closing(sqlite3.connect(tmp_path / "batches.sqlite")) as connection, connection:
        checks = connection.execute("SELECT json_extract(document, '$.checks') FROM batches")
        assert checks.fetchall() == [(0,)]
        changed = "UPDATE batches SET document = json_set(document, '$.checks', ?)"
        connection.execute(changed, (MAX_CHECKS,))
    async with desk(tmp_path) as at:
        batch = await at.ended(batch_id)
        assert [one.code for one in batch.errors.data] == ["input_not_checked"]

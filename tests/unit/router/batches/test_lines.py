"""The lines of an input: what fails a whole batch, with numbers, and what does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from router.batches.lines import MAX_ERRORS, CheckedInput, check_input
from tests.support.batches import ENDPOINT, line
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
        (b"{}\n", "missing_required_parameter"),
        (line("", file_id="f"), "missing_required_parameter"),
        (line("x" * 513, file_id="f"), "invalid_custom_id"),
        (line("a", file_id="f").replace(b"POST", b"GET"), "invalid_method"),
        (line("a", file_id="f").replace(b"{", b'{"n": 1, ', 1), "unknown_parameter"),
        (line("a", file_id="f", model=None), "missing_required_parameter"),
        (line("a", file_id="f", model=7), "missing_required_parameter"),
        (line("a", file_id="f", model="nobody"), "model_not_found"),
        (line("\ud800", file_id="f"), "invalid_json_line"),
        (line("a", file_id="f\udfff"), "invalid_json_line"),
        (line("a", file_id="f", model="\ud83d"), "invalid_json_line"),
        (line("a", file_id="f", **{"\ud83d": 1}), "invalid_json_line"),
        (line("a", file_id="f", model="nobody \U0001f600 \\ud800"), "model_not_found"),
        (line("a", file_id=7), "invalid_type"),
        (line("a", file_id="f", url="u"), "invalid_audio_source"),
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

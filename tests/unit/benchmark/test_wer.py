"""Word errors, their gate and their recordings. The server always says TEXT."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmark.accuracy import wer
from benchmark.shared.speech.wav import wav_bytes
from benchmark.shared.word_errors import (
    WordErrors,
    count,
    count_by_speaker,
    difference,
    interval,
    normaliser,
    total,
)
from tests.support.http_host import Answer, http_host

TEXT = "a line that is always the same"
HALF = "a line that is nothing of the kind"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    body = json.dumps({"text": TEXT}).encode()
    with http_host(
        lambda *_: Answer(body=body, headers={"Content-Type": "application/json"})
    ) as host:
        yield host.url


def test_speakers_words_are_held_against_those_that_fit_best() -> None:
    said = ["one two three", "four five"]
    assert count_by_speaker(said, ["four five", "one too three"]) == WordErrors(5, substitutions=1)
    assert count_by_speaker(said, ["one two three four five"]).errors == 4
    assert count_by_speaker(said, ["four", "one two three", "five"]).errors == 2


def make_folder(folder: Path, *references: str) -> Path:
    for index, reference in enumerate(references):
        (folder / f"{index}.wav").write_bytes(wav_bytes(np.zeros(1600, np.int16)))
        (folder / f"{index}.txt").write_text(reference)
    return folder


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    content: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return content


def test_spelling_numbers_and_marks_are_no_errors() -> None:
    normalise = normaliser("en")
    said, heard = "The colour's grey, twenty-three of them!", "the color is gray 23 of them"
    assert count(said, heard, normalise).errors == 0


def test_each_kind_of_error_is_counted_apart() -> None:
    found = count("one red dog ran home", "one blue dog ran back home", str.lower)
    assert found == WordErrors(words=5, substitutions=1, deletions=0, insertions=1)


def test_a_failed_request_has_lost_every_word_and_words_of_silence_are_insertions() -> None:
    assert count("one red dog", None, str.lower) == WordErrors(words=3, deletions=3)
    assert count("", "thank you", str.lower) == WordErrors(insertions=2)


def test_the_interval_holds_the_rate_and_narrows_with_more_clips() -> None:
    few = [WordErrors(10, substitutions=n % 3) for n in range(20)]
    many = few * 20
    for clips in (few, many):
        low, high = interval(clips)
        assert low < total(clips).wer < high
    assert interval(many)[1] - interval(many)[0] < interval(few)[1] - interval(few)[0]


def test_a_difference_is_taken_clip_by_clip() -> None:
    clips = [WordErrors(10, substitutions=n % 7) for n in range(50)]
    assert difference(clips, clips) == (0.0, 0.0, 0.0)


def test_the_gate_decides_the_exit_status(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", url, "--model", "m", "--folder", str(make_folder(tmp_path, TEXT, HALF))]
    assert wer.main([*flags, "--fail-above", "19+2"]) == 0
    assert last_line(capsys)["wer"] == 20.0
    assert wer.main([*flags, "--fail-above", "19"]) == 1
    assert last_line(capsys)["passed"] is False


def test_a_baseline_is_compared_with_and_may_be_the_gate(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, kept = make_folder(tmp_path, TEXT, HALF), tmp_path / "kept.json"
    flags = ["--url", url, "--model", "m", "--folder", str(folder)]
    assert wer.main([*flags, "--save", str(kept)]) == 0
    assert wer.main([*flags, "--baseline", str(kept), "--fail-above", "baseline+0.1"]) == 0
    assert last_line(capsys)["above_baseline"] == [0.0, 0.0, 0.0]


def test_failures_are_listed_and_count_as_lost_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path, "one two", "three")
    assert wer.main(["--url", "http://127.0.0.1:9", "--model", "m", "--folder", str(folder)]) == 1
    output = capsys.readouterr().out
    assert "failed: 0.wav: connection" in output
    assert json.loads(output.splitlines()[-1])["wer"] == 100.0
